//! The program `runner plot`: axes, ticks, flat curves, resumed runs, several runs, unknown keys.

use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::Path;
use std::process::Command;

/// Runs `runner plot`; returns the SVG, or standard error.
fn plot(dir: &Path, args: &[&str]) -> Result<String, String> {
    let svg = dir.join("out.svg");
    let mut command = Command::new(env!("CARGO_BIN_EXE_runner"));
    let output =
        command.arg("plot").args(args).arg("--out").arg(&svg).current_dir(dir).output().unwrap();
    match output.status.success() {
        true => Ok(std::fs::read_to_string(svg).unwrap()),
        false => Err(String::from_utf8(output.stderr).unwrap()),
    }
}

/// All texts of an SVG.
fn texts(svg: &str) -> Vec<&str> {
    let texts = svg.split("<text").skip(1).map(|t| t.split_once('>').unwrap().1);
    texts.map(|t| t.split('<').next().unwrap().trim()).collect()
}

/// All texts that are numbers.
fn ticks(svg: &str) -> Vec<f64> {
    texts(svg).into_iter().filter_map(|t| t.parse().ok()).collect()
}

/// Points of the curves: lines of more than two points, which axes do not have.
fn curves(svg: &str) -> Vec<Vec<(f64, f64)>> {
    let lines = svg.split("points=\"").skip(1).map(|t| t.split('"').next().unwrap());
    let point = |text: &str| {
        let (x, y) = text.split_once(',').unwrap();
        (x.parse().unwrap(), y.parse().unwrap())
    };
    let lines = lines.map(|line| line.split_whitespace().map(point).collect::<Vec<_>>());
    lines.filter(|line| line.len() > 2).collect()
}

/// Training lines with `key`, one every ten iterations.
fn train(key: &str, iters: impl Iterator<Item = u32>, value: impl Fn(u32) -> f64) -> String {
    iters.filter(|iter| iter % 10 == 0).fold(String::new(), |mut text, iter| {
        let epoch = iter / 100 + 1;
        let value = value(iter);
        writeln!(
            text,
            "{{\"{key}\": {value}, \"epoch\": {epoch}, \"iter\": {iter}, \"step\": {iter}}}"
        )
        .unwrap();
        text
    })
}

#[test]
fn only_an_svg_is_replaced_and_no_file_of_a_checkpoint() {
    let dir = tempfile::tempdir().unwrap();
    let scalars = dir.path().join("scalars.json");
    let text = train("loss", 1..100, f64::from);
    write(&scalars, &text);
    let to = |out: &str| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_runner"));
        command.args(["plot", "scalars.json", "--out", out]).current_dir(dir.path());
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let (done, said) = to("scalars.json");
    assert!(!done && said.contains("exists and is no .svg"), "{said}");
    for file in ["state.json", "model.safetensors"] {
        write(&dir.path().join("epoch_1").join(file), "");
    }
    let (done, said) = to("epoch_1/curves.svg");
    assert!(!done && said.contains("is inside the checkpoint"), "{said}");
    // A second name of the same file is replaced alone.
    std::fs::hard_link(&scalars, dir.path().join("a.svg")).unwrap();
    assert!(to("a.svg").0);
    assert_eq!(std::fs::read_to_string(&scalars).unwrap(), text);
}

fn write(path: &Path, text: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, text).unwrap();
}

#[test]
fn axes_have_titles_and_round_ticks() {
    let dir = tempfile::tempdir().unwrap();
    let loss = train("loss", 10..=470, |iter| 2.3102 - 0.0047 * f64::from(iter));
    write(&dir.path().join("scalars.json"), &loss);
    let svg = plot(dir.path(), &["scalars.json"]).unwrap();
    let all = texts(&svg);
    assert!(all.contains(&"loss") && all.contains(&"iteration"), "{all:?}");
    // Ticks are round numbers, not 10, 240, 470 or 0.1012, 1.1822, 2.2632.
    for tick in ["100", "200", "300", "400", "0.5", "1", "1.5", "2"] {
        assert!(all.contains(&tick), "no tick at {tick}: {all:?}");
    }
}

#[test]
fn constant_series_are_flat() {
    let dir = tempfile::tempdir().unwrap();
    // A constant rate computed in two orders, which differ in the last bits.
    let noise = |iter: u32| if iter.is_multiple_of(20) { 0.001 } else { 0.001 * (1.0 + 1e-12) };
    let series: [(&dyn Fn(u32) -> f64, f64); 2] = [(&noise, 0.001), (&|_| 0.0, 0.0)];
    for (value, tick) in series {
        write(&dir.path().join("scalars.json"), &train("lr", 10..=200, value));
        let svg = plot(dir.path(), &["scalars.json"]).unwrap();
        let curves = curves(&svg);
        let heights: BTreeSet<_> = curves[0].iter().map(|p| p.1.to_string()).collect();
        assert!(curves.len() == 1 && heights.len() == 1, "{heights:?}");
        assert!(ticks(&svg).contains(&tick), "{:?}", ticks(&svg));
    }
}

#[test]
fn resumed_run_is_one_curve() {
    let dir = tempfile::tempdir().unwrap();
    // Killed at iteration 260, resumed from the checkpoint of epoch 1, whose validation comes
    // first.
    let first = train("loss", 1..=100, |_| 2.0)
        + "{\"accuracy\": 50.0, \"step\": 1}\n"
        + &train("loss", 101..=260, |_| 9.0);
    let second = "{\"accuracy\": 50.0, \"step\": 1}\n".to_owned()
        + &train("loss", 101..=300, |_| 1.0)
        + "{\"accuracy\": 90.0, \"step\": 3}\n";
    // A checkpoint was evaluated in between, which is not part of the training.
    let evaluated = "{\"accuracy\": 10.0, \"step\": 0}\n";
    for (stamp, text) in
        [("20260101_000000", &*first), ("20260102_000000", evaluated), ("20260103_000000", &second)]
    {
        write(&dir.path().join("run").join(stamp).join("vis_data/scalars.json"), text);
    }
    let svg = plot(dir.path(), &["run", "--keys", "loss"]).unwrap();
    let curves = curves(&svg);
    assert_eq!((curves.len(), curves[0].len()), (1, 30), "{curves:?}");
    assert!(ticks(&svg).iter().all(|tick| *tick < 3.0 || *tick >= 50.0), "{:?}", ticks(&svg));
    let svg = plot(dir.path(), &["run", "--keys", "accuracy"]).unwrap();
    assert!(texts(&svg).contains(&"iteration") && !ticks(&svg).contains(&20.0), "{svg}");
}

#[test]
fn several_runs_share_a_chart_and_have_a_legend() {
    let dir = tempfile::tempdir().unwrap();
    for (run, value) in [("small", 2.0), ("large", 1.0)] {
        let loss = train("loss", 1..=100, |iter| value / f64::from(iter));
        write(&dir.path().join(run).join("20260101_000000/vis_data/scalars.json"), &loss);
    }
    let svg = plot(dir.path(), &["small", "large"]).unwrap();
    let all = texts(&svg);
    assert_eq!((curves(&svg).len(), all.iter().filter(|t| **t == "loss").count()), (2, 1));
    assert!(all.contains(&"small") && all.contains(&"large"), "{all:?}");
}

#[test]
fn validations_are_plotted_at_iterations() {
    let dir = tempfile::tempdir().unwrap();
    let epoch = |n: u32| {
        train("loss", n * 100 - 99..=n * 100, |_| 1.0)
            + &format!("{{\"accuracy\": {}, \"step\": {n}}}\n", 10 * n)
    };
    let text: String = (1..=4).map(epoch).collect();
    write(&dir.path().join("scalars.json"), &text);
    let svg = plot(dir.path(), &["scalars.json"]).unwrap();
    let curves = curves(&svg);
    let [accuracy, loss] = &curves[..] else { panic!("{curves:?}") };
    assert_eq!((accuracy.len(), loss.len()), (4, 40));
    assert!(texts(&svg).contains(&"iteration") && !texts(&svg).contains(&"epoch"));
    // Compares the end of both curves in their charts.
    let beside = loss[39].0 - accuracy[3].0;
    assert!((loss[9].0 - accuracy[0].0 - beside).abs() <= 1.0, "{curves:?}");
}

#[test]
fn unknown_key_error_lists_the_known_keys() {
    let dir = tempfile::tempdir().unwrap();
    let text = "{\"loss\": 1.0, \"lr\": 0.1, \"time\": 0.5, \"iter\": 10, \"step\": 10}\n";
    write(&dir.path().join("scalars.json"), text);
    let said = plot(dir.path(), &["scalars.json", "--keys", "loss", "acc"]).unwrap_err();
    assert_eq!(said, "error: unknown key `acc`; known: iter, loss, lr, step, time\n");
    let said = plot(dir.path(), &["."]).map(drop);
    assert_eq!(said, Ok(()));
    std::fs::create_dir(dir.path().join("empty")).unwrap();
    let said = plot(dir.path(), &["empty"]).unwrap_err();
    assert!(said.starts_with("error: empty: no scalars.json"), "{said}");
}
