//! The variables of `torchrun`.
//!
//! `RANK` and `WORLD_SIZE` must both be set or both unset. With more than one rank, `MASTER_ADDR`
//! and `MASTER_PORT` must be set too: with defaults, ranks could connect to different stores. A
//! wrong default for `LOCAL_RANK` would put two ranks on one device, so without it the local rank
//! is known only if `MASTER_ADDR` is a loopback address.

use super::reader::{Reader, check_at_most, check_below};
use super::topology::Topology;
use crate::Result;
use crate::store::tcp::server::is_loopback;

/// Any of these variables identifies this launcher.
pub(super) const MARKERS: [&str; 4] = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"];

pub(super) fn read(reader: &mut Reader<'_>, topology: &mut Topology) -> Result<()> {
    reader.hint = "though the launcher is torchrun (chosen or detected); set it, start the \
                   ranks with `launch` or torchrun, or choose another launcher";
    let single = "single process";
    let world_size = reader.value("world_size", &["WORLD_SIZE"], None)?;
    let rank = reader.value("rank", &["RANK"], None)?;
    let one = world_size == 1;
    let on_loopback = |(_, addr): (_, String)| is_loopback(addr.trim());
    let all_here = one || reader.first(&["MASTER_ADDR"]).is_some_and(on_loopback);
    let uncounted = all_here && reader.first(&["LOCAL_WORLD_SIZE"]).is_none();
    let local_rank = reader.optional(
        "local_rank",
        &["LOCAL_RANK"],
        match (one, uncounted) {
            (true, _) => Some((0, single)),
            (_, true) => Some((rank, "the rank: all ranks are on this host")),
            _ => None,
        },
    )?;
    let here = ("127.0.0.1".to_owned(), single);
    topology.master_addr = reader.value("master_addr", &["MASTER_ADDR"], one.then_some(here))?;
    let local_world_size = reader.optional(
        "local_world_size",
        &["LOCAL_WORLD_SIZE"],
        all_here.then_some((world_size, "the world size: all ranks are on this host")),
    )?;
    topology.master_port = reader.master_port(world_size, one.then_some((0, single)))?;
    topology.node_rank = reader.optional("node_rank", &["GROUP_RANK"], None)?;
    let first = Some((0, "first attempt"));
    topology.restart_count =
        reader.value("restart_count", &["TORCHELASTIC_RESTART_COUNT"], first)?;
    let unnamed = ("none".to_owned(), "torchrun's default");
    topology.run_id = reader.value("run_id", &["TORCHELASTIC_RUN_ID"], Some(unnamed))?;
    topology.agent_store = agent_store(reader);

    check_below(("RANK", rank), ("WORLD_SIZE", world_size))?;
    let most = local_world_size.unwrap_or(world_size);
    check_at_most(("LOCAL_WORLD_SIZE", most), ("WORLD_SIZE", world_size))?;
    if let Some(local_rank) = local_rank {
        let counted = if local_world_size.is_some() { "LOCAL_WORLD_SIZE" } else { "WORLD_SIZE" };
        check_below(("LOCAL_RANK", local_rank), (counted, most))?;
    }
    (topology.rank, topology.world_size) = (rank, world_size);
    (topology.local_rank, topology.local_world_size) = (local_rank, local_world_size);
    Ok(())
}

/// Reads `TORCHELASTIC_USE_AGENT_STORE`. As in PyTorch, only the literal `True` enables it.
fn agent_store(reader: &mut Reader<'_>) -> bool {
    let (value, origin) = match reader.first(&["TORCHELASTIC_USE_AGENT_STORE"]) {
        Some((name, text)) => (text == "True", name),
        None => (false, "rank 0 hosts the store"),
    };
    reader.note("agent_store", &value, origin);
    value
}

#[cfg(test)]
mod tests {
    use super::super::tests::{STANDALONE, STATIC, from};
    use crate::Error;
    use crate::init::Accelerator;

    #[test]
    fn every_value_of_a_recorded_static_job_has_its_source() {
        let topology = from(STATIC).unwrap();
        assert_eq!((topology.rank, topology.world_size), (1, 2));
        assert_eq!((topology.local_rank, topology.local_world_size), (Some(1), Some(2)));
        assert_eq!(topology.master(), "127.0.0.1:29500");
        assert!(topology.agent_store);
        assert_eq!((&topology.run_id[..], topology.restart_count), ("none", 0));
        assert_eq!(
            topology.to_string(),
            "launcher pytorch (RANK), world_size 2 (WORLD_SIZE), rank 1 (RANK), local_rank 1 (LOCAL_RANK), master_addr \
             127.0.0.1 (MASTER_ADDR), local_world_size 2 (LOCAL_WORLD_SIZE), master_port 29500 \
             (MASTER_PORT), node_rank 0 (GROUP_RANK), restart_count 0 (TORCHELASTIC_RESTART_COUNT), run_id none \
             (TORCHELASTIC_RUN_ID), agent_store true (TORCHELASTIC_USE_AGENT_STORE)"
        );
    }

    #[test]
    fn a_recorded_standalone_job_is_read() {
        let topology = from(STANDALONE).unwrap();
        assert_eq!(topology.master(), "localhost:33797");
        assert_eq!(topology.run_id, "3836b47b-7221-4ed1-b4a7-1f1dab4907b1");
    }

    #[test]
    fn contradictions_are_errors_that_name_the_variable() {
        for (change, text) in [
            ("RANK=2", "RANK=2 is not below WORLD_SIZE=2"),
            ("RANK=-1", "RANK=\"-1\" is not a number"),
            ("RANK=", "RANK is set, but empty"),
            ("RANK", "RANK is not set"),
            ("WORLD_SIZE", "WORLD_SIZE is not set"),
            ("WORLD_SIZE=0", "RANK=1 is not below WORLD_SIZE=0"),
            ("WORLD_SIZE=two", "WORLD_SIZE=\"two\""),
            ("LOCAL_RANK=2", "LOCAL_RANK=2 is not below LOCAL_WORLD_SIZE=2"),
            ("LOCAL_WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3 is more than WORLD_SIZE=2"),
            ("MASTER_ADDR", "MASTER_ADDR is not set"),
            ("MASTER_ADDR= ", "MASTER_ADDR is set, but empty"),
            ("MASTER_PORT", "MASTER_PORT is not set"),
            ("MASTER_PORT=0", "MASTER_PORT=0"),
            ("MASTER_PORT=65536", "MASTER_PORT=\"65536\" is not a number in range"),
            ("MASTER_ADDR=node1\nLOCAL_WORLD_SIZE\nLOCAL_RANK=2", "LOCAL_RANK=2 is not below"),
            ("TORCHELASTIC_RESTART_COUNT=x", "TORCHELASTIC_RESTART_COUNT=\"x\""),
        ] {
            let error = from(&format!("{STATIC}\n{change}")).unwrap_err();
            assert!(matches!(error, Error::InvalidArgument(_)), "{change}: {error}");
            assert!(error.to_string().contains(text), "{change}: {error}");
        }
    }

    #[test]
    fn only_the_literal_true_means_agent_store() {
        for (text, agent_store) in [
            ("TORCHELASTIC_USE_AGENT_STORE=True", true),
            ("TORCHELASTIC_USE_AGENT_STORE=true", false),
            ("TORCHELASTIC_USE_AGENT_STORE=1", false),
            ("TORCHELASTIC_USE_AGENT_STORE", false),
        ] {
            let topology = from(&format!("{STATIC}\n{text}")).unwrap();
            assert_eq!(topology.agent_store, agent_store, "{text}");
        }
    }

    #[test]
    fn local_world_size_is_optional_on_one_host() {
        let topology = from(&format!("{STATIC}\nLOCAL_WORLD_SIZE")).unwrap();
        assert_eq!(topology.local_world_size, Some(2));
        let single = from("RANK=0\nWORLD_SIZE=1").unwrap();
        assert_eq!((single.local_rank, single.local_world_size), (Some(0), Some(1)));
    }

    #[test]
    fn four_variables_suffice_and_local_rank_has_no_default() {
        let at = |addr| from(&format!("RANK=1\nWORLD_SIZE=2\nMASTER_ADDR={addr}\nMASTER_PORT=1"));
        for addr in ["127.0.0.1", "localhost", "::1"] {
            let topology = at(addr).unwrap();
            assert_eq!((topology.local_rank, topology.local_world_size), (Some(1), Some(2)));
            assert_eq!(topology.device(Accelerator::Cuda).unwrap(), 1);
            assert!(topology.to_string().contains("all ranks are on this host"), "{topology}");
        }
        let topology = at("10.0.0.1").unwrap();
        assert_eq!((topology.local_rank, topology.local_world_size), (None, None));
        let error = topology.device(Accelerator::Cuda).unwrap_err().to_string();
        assert!(error.contains("LOCAL_RANK") && error.contains("Topology::locate"), "{error}");
        // A rank that sees one device uses it, whatever its local rank.
        let variables = "RANK=1\nWORLD_SIZE=2\nMASTER_ADDR=node\nMASTER_PORT=1";
        let shown = from(&format!("{variables}\nCUDA_VISIBLE_DEVICES=3")).unwrap();
        assert_eq!(shown.device(Accelerator::Cuda).unwrap(), 0);
        // A loopback address may be the end of a tunnel.
        let tunnel = from(&format!("{variables}\nMASTER_ADDR=::1\nLOCAL_WORLD_SIZE=1")).unwrap();
        assert_eq!((tunnel.local_rank, tunnel.local_world_size), (None, Some(1)));
    }
}
