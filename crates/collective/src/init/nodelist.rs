//! Slurm's compact lists: `n[1-3,07],m1` for hosts, `2(x2),1` for tasks per host.
//!
//! Hosts are in the order of `scontrol show hostnames`, which the tests compare with where it is
//! installed: with several brackets in one name the last varies fastest, then the first, the
//! second, and so on. Numbers keep their leading zeros. As in Slurm, nothing may follow a name's
//! last bracket.
//!
//! Invariant: a list expands to at most [`MAX_HOSTS`], however short its text.

/// Maximum number of hosts in a list; Slurm's own limit for a range.
pub(super) const MAX_HOSTS: usize = 65_536;

/// Returns the first host of a node list, and the number of hosts; the error describes the problem.
pub(super) fn hosts(list: &str) -> Result<(String, usize), String> {
    let (mut first, mut total) = (None, 0_usize);
    for name in split_outside_brackets(list)? {
        let (mut host, mut count, mut rest) = (String::new(), 1_usize, name);
        while let Some((literal, tail)) = rest.split_once('[') {
            let (ranges, tail) = tail.split_once(']').expect("brackets are balanced");
            let (number, times) = numbers(ranges)?;
            host = host + literal + number;
            (count, rest) = (count.saturating_mul(times), tail);
        }
        if rest.len() < name.len() && !rest.is_empty() {
            return Err(format!("{name:?}: nothing may follow the last bracket"));
        }
        total = total.saturating_add(count);
        first.get_or_insert(host + rest);
    }
    if total > MAX_HOSTS {
        return Err(format!("more than {MAX_HOSTS} hosts"));
    }
    Ok((first.expect("a split is not empty"), total))
}

/// Expands `2(x2),1` to 2, 2, 1.
pub(super) fn tasks_per_node(text: &str) -> Result<Vec<usize>, String> {
    let mut counts = Vec::new();
    for item in text.split(',') {
        let (count, times) = match item.split_once("(x") {
            None => (item, "1"),
            Some((count, rest)) => (count, rest.strip_suffix(')').unwrap_or_default()),
        };
        let (Ok(count), Ok(times)) = (count.parse(), times.parse::<usize>()) else {
            return Err(format!("{item:?} is not a count such as 2 or 2(x3)"));
        };
        if times > MAX_HOSTS - counts.len() {
            return Err(format!("more than {MAX_HOSTS} hosts"));
        }
        counts.resize(counts.len() + times, count);
    }
    Ok(counts)
}

/// Splits a list at the commas that are not inside brackets.
fn split_outside_brackets(list: &str) -> Result<Vec<&str>, String> {
    let (mut names, mut start, mut inside) = (Vec::new(), 0, false);
    for (at, byte) in list.bytes().enumerate() {
        match (byte, inside) {
            (b'[', false) => inside = true,
            (b']', true) => inside = false,
            (b'[', true) | (b']', false) => return Err("unbalanced brackets".to_owned()),
            (b',', false) => {
                names.push(&list[start..at]);
                start = at + 1;
            }
            _ => {}
        }
    }
    if inside {
        return Err("unbalanced brackets".to_owned());
    }
    names.push(&list[start..]);
    if names.iter().any(|name| name.is_empty() || name.contains(char::is_whitespace)) {
        return Err("an empty name, or a space in a name".to_owned());
    }
    Ok(names)
}

/// Returns the first number of `1-3,07` as text, and how many there are.
fn numbers(ranges: &str) -> Result<(&str, usize), String> {
    let mut count = 0_usize;
    for range in ranges.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        match (number(first), number(last)) {
            (Some(first), Some(last)) if first <= last => {
                count = count.saturating_add((last - first).saturating_add(1));
            }
            _ => return Err(format!("{range:?} is not a range such as 1-3")),
        }
    }
    Ok((ranges.split(['-', ',']).next().unwrap_or_default(), count))
}

fn number(text: &str) -> Option<usize> {
    // Slurm itself drops digits of longer numbers.
    let plain = text.len() <= 18 && text.bytes().all(|byte| byte.is_ascii_digit());
    if plain { text.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;
    use std::process::Command;

    use proptest::prelude::*;
    use proptest::test_runner::TestRunner;

    use super::*;

    #[test]
    fn lists_expand_as_scontrol_does() {
        // Each was printed by `scontrol show hostnames` of Slurm 22.05.8.
        for (list, want) in [
            ("n[1-3,7,09-11]", "n1 n2 n3 n7 n09 n10 n11"),
            ("rack[0-1]n[1-2]", "rack0n1 rack0n2 rack1n1 rack1n2"),
            ("a1,b2,c[3-4]", "a1 b2 c3 c4"),
            ("a[1-2]b[1-2]c[1-2]", "a1b1c1 a1b1c2 a2b1c1 a2b1c2 a1b2c1 a1b2c2 a2b2c1 a2b2c2"),
            ("n[1-2]x[3]", "n1x3 n2x3"),
            ("n[1-2][3-4]", "n13 n14 n23 n24"),
            ("n[01-3]", "n01 n02 n03"),
            ("n[1-003]", "n1 n2 n3"),
            ("n[098-101]", "n098 n099 n100 n101"),
            ("n[1,1]", "n1 n1"),
            ("n[5-5,1-2]", "n5 n1 n2"),
            ("[1-3]", "1 2 3"),
            ("n.x-[00]", "n.x-00"),
        ] {
            let want: Vec<_> = want.split(' ').collect();
            assert_eq!(hosts(list).unwrap(), (want[0].to_owned(), want.len()), "{list}");
        }
    }

    #[test]
    fn malformed_lists_are_errors() {
        for list in [
            "",
            ",",
            "a,",
            "a b",
            "n[1-2]-ib",
            "n[3-1]",
            "n[]",
            "n[1-2,]",
            "n[1",
            "n1]",
            "n[a-b]",
            "n[0x1]",
            "n[1-+2]",
            "n[[1]]",
            "n[1-2-3]",
            "n[1234567890123456789]",
        ] {
            assert!(hosts(list).is_err(), "{list}: {:?}", hosts(list));
        }
    }

    #[test]
    fn expansion_is_limited() {
        assert_eq!(hosts("n[1-65536]").unwrap().1, MAX_HOSTS);
        for list in ["n[1-65537]", "n[0-999999999999999999]", "a[1-300]b[1-300]", "a[1-65536],b"] {
            assert!(hosts(list).unwrap_err().contains("more than 65536"), "{list}");
        }
        assert!(tasks_per_node("1(x65536),1").unwrap_err().contains("more than"));
        assert!(tasks_per_node("1(x99999999999)").is_err());
    }

    #[test]
    fn tasks_per_node_expands_repetitions() {
        assert_eq!(tasks_per_node("2(x2)").unwrap(), [2, 2]);
        assert_eq!(tasks_per_node("3,1").unwrap(), [3, 1]);
        assert_eq!(tasks_per_node("2,1(x3),4").unwrap(), [2, 1, 1, 1, 4]);
        for text in ["", "2(x", "2(x2", "(x2)", "2(y2)", "2,", "-1", "2 (x2)"] {
            assert!(tasks_per_node(text).is_err(), "{text:?}");
        }
    }

    /// A configuration sufficient for `scontrol show hostnames`.
    fn slurm_conf() -> PathBuf {
        let conf = std::env::temp_dir().join(format!("collective-{}.conf", std::process::id()));
        std::fs::write(&conf, "ClusterName=test\nSlurmctldHost=localhost\n").unwrap();
        conf
    }

    fn expanded_by_scontrol(conf: &PathBuf, list: &str) -> Vec<String> {
        let mut scontrol = Command::new("scontrol");
        let output = scontrol.args(["show", "hostnames", list]).env("SLURM_CONF", conf).output();
        let output = output.unwrap();
        assert!(output.status.success(), "{list}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
    }

    #[test]
    #[ignore = "needs Debian's slurm-client"]
    fn any_list_expands_as_scontrol_does() {
        let conf = slurm_conf();
        let range =
            (0..120_u32, 0..12_u32, 0..4_usize).prop_map(|(first, more, width)| match more {
                0 => format!("{first:0width$}"),
                _ => format!("{first:0width$}-{}", first + more),
            });
        let bracket = prop::collection::vec(range, 1..4).prop_map(|all| all.join(","));
        let part = ("[a-c.-]{0,2}", bracket).prop_map(|(text, ranges)| format!("{text}[{ranges}]"));
        let name = prop_oneof![
            "[a-c][a-c0-9.-]{0,6}",
            prop::collection::vec(part, 1..4).prop_map(|parts| format!("n{}", parts.concat())),
        ];
        let list = prop::collection::vec(name, 1..4).prop_map(|names| names.join(","));
        let mut runner = TestRunner::new(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::with_cases(300)
        });
        let checked = runner.run(&list, |list| {
            let want = expanded_by_scontrol(&conf, &list);
            prop_assert_eq!(hosts(&list).unwrap(), (want[0].clone(), want.len()));
            Ok(())
        });
        std::fs::remove_file(conf).unwrap();
        checked.unwrap();
    }

    proptest! {
        #[test]
        fn arbitrary_text_parses_or_is_an_error(text in "[n1-3,\\[\\]()x -]{0,24}") {
            if let Ok((_, count)) = hosts(&text) {
                prop_assert!(count > 0 && count <= MAX_HOSTS);
            }
            let _ = tasks_per_node(&text);
        }
    }
}
