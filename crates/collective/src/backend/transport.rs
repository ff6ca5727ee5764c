//! [`join`]: chooses a group's transport and joins the group over that backend.

use std::sync::Arc;

#[cfg(feature = "gloo")]
use super::gloo;
#[cfg(feature = "npu")]
use super::hccl;
#[cfg(feature = "cuda")]
use super::nccl;
use super::rendezvous::{RankLocation, exchange_locations, find_inaccessible};
use super::shared_config::SharedConfig;
use super::{Backend, tcp};
use crate::store::Store;
use crate::{GroupOptions, Rank, Result, Transport};

/// Joins a group over the backend that the options and the ranks' locations require.
pub(crate) fn join(
    store: &Arc<dyn Store>,
    rank: Rank,
    world_size: usize,
    options: &GroupOptions,
) -> Result<Arc<dyn Backend>> {
    let shared = shared_config(world_size, options);
    let joining = exchange_locations(&**store, rank, world_size, options, &library, shared)?;
    let (transport, reason) = choose_transport(options.transport, &joining.locations);
    let backend: Arc<dyn Backend> = match transport {
        Transport::Tcp => Arc::new(tcp::join(&joining, reason, false)?),
        Transport::Host | Transport::Auto => tcp::join_host(&joining, reason)?,
        #[cfg(feature = "gloo")]
        Transport::Gloo => Arc::new(gloo::join(&joining, reason)?),
        #[cfg(not(feature = "gloo"))]
        Transport::Gloo => return Err(not_built("gloo", "gloo")),
        #[cfg(feature = "cuda")]
        Transport::Nccl => {
            let libraries = nccl::Libraries::global();
            Arc::new(nccl::join(store, &joining, reason, libraries, &nccl::Config::default())?)
        }
        #[cfg(not(feature = "cuda"))]
        Transport::Nccl => return Err(not_built("nccl", "cuda")),
        #[cfg(feature = "npu")]
        Transport::Hccl => {
            let libraries = hccl::Libraries::global();
            Arc::new(hccl::join(store, &joining, reason, libraries, &hccl::Config::default())?)
        }
        #[cfg(not(feature = "npu"))]
        Transport::Hccl => return Err(not_built("hccl", "npu")),
    };
    joining.delete_own_keys();
    Ok(backend)
}

/// Configuration of a group made without a connector.
fn shared_config(world_size: usize, options: &GroupOptions) -> SharedConfig {
    let shared = SharedConfig::new(world_size, options);
    match options.transport {
        #[cfg(feature = "cuda")]
        Transport::Nccl => nccl::Config::default().add_to(shared),
        #[cfg(feature = "npu")]
        Transport::Hccl => hccl::Config::default().add_to(shared),
        _ => shared,
    }
}

#[cfg(not(all(feature = "gloo", feature = "cuda", feature = "npu")))]
fn not_built(backend: &'static str, feature: &str) -> crate::Error {
    let what = format!("this build: it lacks the feature `{feature}` of `collective`");
    crate::Error::Unsupported { backend, what }
}

/// Returns the version of this process's library for a device's transport, or why it has none.
fn library(transport: Transport) -> std::result::Result<i32, String> {
    match transport {
        #[cfg(feature = "cuda")]
        Transport::Nccl => nccl::here(),
        #[cfg(not(feature = "cuda"))]
        Transport::Nccl => Err("is built without the feature `cuda`".into()),
        #[cfg(feature = "npu")]
        _ => hccl::here(),
        #[cfg(not(feature = "npu"))]
        _ => Err("is built without the feature `npu`".into()),
    }
}

/// Returns the transport to use, and the reason.
fn choose_transport(wanted: Transport, locations: &[RankLocation]) -> (Transport, String) {
    if wanted != Transport::Auto {
        return choose_host_transport(wanted, locations);
    }
    let mut why_not = String::new();
    for (transport, library, what) in [
        (Transport::Nccl, "NCCL", "a CUDA device and NCCL"),
        (Transport::Hccl, "HCCL", "an NPU and HCCL"),
    ] {
        if locations.iter().all(|location| location.support(transport).index.is_none()) {
            continue;
        }
        let lacks = |location: &RankLocation| location.support(transport).library.clone().err();
        let mut ranks = locations.iter().enumerate();
        match ranks.find_map(|(rank, location)| Some((rank, lacks(location)?))) {
            None => return (transport, format!("all ranks have {what}")),
            Some((rank, why)) => {
                why_not += &format!("; it is not {library} because rank {rank} {why}");
            }
        }
    }
    let (transport, reason) = choose_host_transport(wanted, locations);
    (transport, reason + &why_not)
}

fn choose_host_transport(wanted: Transport, locations: &[RankLocation]) -> (Transport, String) {
    if wanted == Transport::Auto
        && let Some((rank, of)) = find_inaccessible(locations)
    {
        let why = format!(
            "rank {rank} may not open the memory of rank {of}, which runs as another user or group, or is not dumpable"
        );
        return (Transport::Tcp, why);
    }
    let remote = locations.iter().position(|location| location.machine() != locations[0].machine());
    match (wanted, remote) {
        (Transport::Auto, None) => (Transport::Host, "all ranks are on one machine".into()),
        (Transport::Auto, Some(rank)) => {
            (Transport::Host, format!("rank {rank} is on another machine than rank 0"))
        }
        _ => (wanted, "requested".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::backend::rendezvous::tests::locations;
    use crate::backend::rendezvous::{DeviceSupport, PtraceAccess};

    #[test]
    fn auto_is_host_on_one_machine_and_on_several() {
        let mut locations = locations(3);
        assert_eq!(choose_transport(Transport::Auto, &locations).0, Transport::Host);
        assert_eq!(choose_transport(Transport::Tcp, &locations).0, Transport::Tcp);
        locations[2].host_id = Some("elsewhere".into());
        let (chosen, why) = choose_transport(Transport::Auto, &locations);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("rank 2"), "{why}");
        assert_eq!(choose_transport(Transport::Host, &locations).0, Transport::Host);
    }

    #[test]
    fn auto_is_tcp_if_ranks_may_not_open_each_others_memory() {
        let mut locations = locations(3);
        for (pid, location) in locations.iter_mut().enumerate() {
            (location.pid, location.access) =
                (pid as u32, PtraceAccess { user: (1, 1), dumpable: true, all: false });
        }
        assert_eq!(choose_transport(Transport::Auto, &locations).0, Transport::Host);
        let whole = locations.clone();
        locations[1].access.dumpable = false;
        let (chosen, why) = choose_transport(Transport::Auto, &locations);
        assert_eq!(chosen, Transport::Tcp);
        assert!(why.starts_with("rank 0 may not open the memory of rank 1"), "{why}");
        assert_eq!(choose_transport(Transport::Host, &locations).0, Transport::Host);
        locations.iter_mut().for_each(|location| location.access.all = true);
        assert_eq!(choose_transport(Transport::Auto, &locations).0, Transport::Host);
        locations = whole;
        locations[2].access.user = (1, 2);
        assert_eq!(choose_transport(Transport::Auto, &locations).0, Transport::Tcp);
        // No other rank opens the memory of a rank that is alone on its machine.
        locations[2].host_id = Some("elsewhere".into());
        assert_eq!(choose_transport(Transport::Auto, &locations).0, Transport::Host);
    }

    #[test]
    fn auto_is_nccl_if_all_ranks_have_a_cuda_device_and_nccl() {
        let mut locations = locations(3);
        for location in &mut locations {
            location.nccl = DeviceSupport { index: Some(0), library: Ok(22707) };
        }
        let (chosen, why) = choose_transport(Transport::Auto, &locations);
        assert_eq!(chosen, Transport::Nccl);
        assert!(why.contains("all ranks have a CUDA device and NCCL"), "{why}");
        assert_eq!(choose_transport(Transport::Host, &locations).0, Transport::Host);
        locations[1].nccl.library = Err("cannot use NCCL: no libnccl".into());
        let (chosen, why) = choose_transport(Transport::Auto, &locations);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("rank 1 cannot use NCCL: no libnccl"), "{why}");
        assert_eq!(choose_transport(Transport::Nccl, &locations).0, Transport::Nccl);
        locations[0].nccl = locations[0].hccl.clone();
        locations[0].nccl.library = Err("gives no CUDA device".into());
        let (chosen, why) = choose_transport(Transport::Auto, &locations);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("rank 0 gives no CUDA device"), "{why}");
    }

    #[test]
    fn auto_is_hccl_if_all_ranks_have_an_npu_and_hccl() {
        let mut locations = locations(3);
        for location in &mut locations {
            location.hccl = DeviceSupport { index: Some(0), library: Ok(0) };
        }
        let (chosen, why) = choose_transport(Transport::Auto, &locations);
        assert_eq!((chosen, &why[..]), (Transport::Hccl, "all ranks have an NPU and HCCL"));
        assert_eq!(choose_transport(Transport::Host, &locations).0, Transport::Host);
        // Only one kind of device is present on all ranks.
        locations[1].nccl.index = Some(0);
        assert_eq!(choose_transport(Transport::Auto, &locations).0, Transport::Hccl);
        locations[2].hccl.library = Err("cannot use HCCL: no libhccl".into());
        let (chosen, why) = choose_transport(Transport::Auto, &locations);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("not NCCL because rank 0 gives no CUDA device"), "{why}");
        assert!(why.contains("not HCCL because rank 2 cannot use HCCL: no libhccl"), "{why}");
        assert_eq!(choose_transport(Transport::Hccl, &locations).0, Transport::Hccl);
    }
}
