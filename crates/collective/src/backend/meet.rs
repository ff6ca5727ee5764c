//! How ranks that join a group tell one another what they need to, and which backend they take.
//!
//! Each rank says in the store where it is and its [configuration](super::shared_config); all hear what
//! all say, and so all choose alike, or fail alike. They hear it from rank 0, which gathers it: the
//! requests to the store grow with the ranks and not with their square.

use std::fs;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

#[cfg(feature = "gloo")]
use super::gloo;
#[cfg(feature = "hccl")]
use super::hccl;
use super::host::sys;
#[cfg(feature = "nccl")]
use super::nccl;
use super::shared_config::{Record, SharedConfig};
use super::{Backend, host, tcp};
use crate::store::{Store, deadline, exchange, join_values, missing, split_values};
use crate::{Error, GroupOptions, Rank, Result, Transport};

/// How long rank 0, which may host the store, waits for all to hear that they disagree.
const HEARD: Duration = Duration::from_secs(3);

/// A rank that joins a group, and all that is known of the others.
#[derive(Debug)]
pub(crate) struct Joining<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) rank: Rank,
    pub(crate) options: &'a GroupOptions,
    pub(crate) deadline: Instant,
    pub(crate) shared: SharedConfig,
    /// By rank.
    pub(crate) places: Vec<Place>,
    /// Keys that this rank has set.
    pub(crate) said: Mutex<Vec<String>>,
}

/// Where a rank is.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Place {
    pub(crate) pid: u32,
    /// Which boot of which machine.
    boot_id: String,
    pid_namespace: String,
    host_id: Option<String>,
    access: Access,
    net_namespace: String,
    /// Its address towards the store.
    pub(crate) ip: Option<IpAddr>,
    shared: Record,
    /// Its CUDA device.
    cuda: Option<u32>,
    /// Its NPU.
    npu: Option<u32>,
    /// Its libraries for them.
    pub(crate) here: Here,
}

/// Who may open a process's memory, and whose it may open: `ptrace(2)`, "Ptrace access mode checking".
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
struct Access {
    user: u64,
    /// By processes of the same user.
    dumpable: bool,
    /// Any process's, by its capabilities.
    all: bool,
}

/// The libraries for devices that a process has, or why it has them not.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Here {
    /// NCCL, by its version.
    pub(crate) nccl: std::result::Result<i32, String>,
    pub(crate) hccl: std::result::Result<(), String>,
}

impl Default for Here {
    /// None was looked for.
    fn default() -> Self {
        let why = || "it has not looked".to_owned();
        Self { nccl: Err(why()), hccl: Err(why()) }
    }
}

/// Joins a group over the backend that the options and the ranks' places call for.
pub(crate) fn join(
    store: &Arc<dyn Store>,
    rank: Rank,
    world_size: usize,
    options: &GroupOptions,
) -> Result<Arc<dyn Backend>> {
    let here = Here { nccl: nccl_here(options), hccl: hccl_here(options) };
    let shared = shared_config(world_size, options);
    let joining = gather(&**store, rank, world_size, options, here, shared)?;
    let (transport, reason) = choose(options.transport, &joining.places);
    let backend: Arc<dyn Backend> = match transport {
        Transport::Tcp => Arc::new(tcp::join(&joining, reason, false)?),
        Transport::Host | Transport::Auto => host(&joining, reason)?,
        #[cfg(feature = "gloo")]
        Transport::Gloo => Arc::new(gloo::join(&joining, reason)?),
        #[cfg(not(feature = "gloo"))]
        Transport::Gloo => return Err(not_built("gloo")),
        #[cfg(feature = "nccl")]
        Transport::Nccl => {
            let libraries = nccl::Libraries::global();
            Arc::new(nccl::join(store, &joining, reason, libraries, &nccl::Config::default())?)
        }
        #[cfg(not(feature = "nccl"))]
        Transport::Nccl => return Err(not_built("nccl")),
        #[cfg(feature = "hccl")]
        Transport::Hccl => {
            let libraries = hccl::Libraries::global();
            Arc::new(hccl::join(store, &joining, reason, libraries, &hccl::Config::default())?)
        }
        #[cfg(not(feature = "hccl"))]
        Transport::Hccl => return Err(not_built("hccl")),
    };
    joining.forget();
    Ok(backend)
}

/// Of a group over a transport without a connector.
fn shared_config(world_size: usize, options: &GroupOptions) -> SharedConfig {
    let shared = SharedConfig::new(world_size, options);
    match options.transport {
        #[cfg(feature = "nccl")]
        Transport::Nccl => nccl::Config::default().add_to(shared),
        #[cfg(feature = "hccl")]
        Transport::Hccl => hccl::Config::default().add_to(shared),
        _ => shared,
    }
}

#[cfg(not(all(feature = "gloo", feature = "nccl", feature = "hccl")))]
fn not_built(backend: &'static str) -> Error {
    let what = format!("this build: it lacks the feature `{backend}` of the crate");
    Error::Unsupported { backend, what }
}

/// What this process's NCCL is, if the group is made for a device.
fn nccl_here(options: &GroupOptions) -> std::result::Result<i32, String> {
    if options.cuda_device.is_none() && options.transport != Transport::Nccl {
        return Err("it gives no CUDA device".into());
    }
    #[cfg(feature = "nccl")]
    return nccl::here();
    #[cfg(not(feature = "nccl"))]
    return Err("it is built without the feature `nccl`".into());
}

/// Whether this process has HCCL, if the group is made for an NPU.
fn hccl_here(options: &GroupOptions) -> std::result::Result<(), String> {
    if options.npu_device.is_none() && options.transport != Transport::Hccl {
        return Err("it gives no NPU".into());
    }
    #[cfg(feature = "hccl")]
    return hccl::here();
    #[cfg(not(feature = "hccl"))]
    return Err("it is built without the feature `hccl`".into());
}

/// Joins a group for the memory of the host: on one machine, or several.
pub(crate) fn host(joining: &Joining<'_>, reason: String) -> Result<Arc<dyn Backend>> {
    let own = &joining.places[joining.rank];
    let several = joining.places.iter().any(|place| place.machine() != own.machine());
    Ok(match several {
        true => Arc::new(tcp::join(joining, reason, true)?),
        false => Arc::new(host::shm::join(joining, reason)?),
    })
}

/// Tells the ranks where this one is, and hears where they are. The store has no keys of another group of
/// the options' name.
pub(crate) fn gather<'a>(
    store: &'a dyn Store,
    rank: Rank,
    world_size: usize,
    options: &'a GroupOptions,
    here: Here,
    shared: SharedConfig,
) -> Result<Joining<'a>> {
    check_rank(rank, world_size)?;
    let deadline = deadline(options.timeout);
    let own = Place { here, shared: shared.record(), ..Place::of_this_process(store, options)? };
    let places = vec![own.clone(); world_size];
    let said = Mutex::default();
    let mut joining = Joining { store, rank, options, deadline, shared, places, said };
    joining.places = tell_places(&joining, &own)?;
    Ok(joining)
}

/// Refuses a rank that there is not.
pub(crate) fn check_rank(rank: Rank, world_size: usize) -> Result<()> {
    if rank < world_size {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("there is no rank {rank} among {world_size} ranks")))
}

fn choose(asked: Transport, places: &[Place]) -> (Transport, String) {
    if asked != Transport::Auto {
        return choose_for_host(asked, places);
    }
    let mut why_not = String::new();
    for (transport, library, device) in DEVICES {
        if places.iter().all(|place| place.device(transport).is_none()) {
            continue;
        }
        let lacks = |place: &Place| match (place.device(transport), place.lacks(transport)) {
            (None, _) => Some(format!("gives no {}", device.1)),
            (Some(_), Some(why)) => Some(format!("cannot use {library}: {why}")),
            (Some(_), None) => None,
        };
        match places.iter().enumerate().find_map(|(rank, place)| Some((rank, lacks(place)?))) {
            None => {
                return (
                    transport,
                    format!("all ranks have {} {} and {library}", device.0, device.1),
                );
            }
            Some((rank, why)) => {
                why_not += &format!("; it is not {library} because rank {rank} {why}");
            }
        }
    }
    let (transport, reason) = choose_for_host(asked, places);
    (transport, reason + &why_not)
}

/// The transports for devices, in order of preference, their libraries, what they are for.
const DEVICES: [(Transport, &str, (&str, &str)); 2] =
    [(Transport::Nccl, "NCCL", ("a", "CUDA device")), (Transport::Hccl, "HCCL", ("an", "NPU"))];

fn choose_for_host(asked: Transport, places: &[Place]) -> (Transport, String) {
    if asked == Transport::Auto
        && let Some((rank, of)) = shut_out(places)
    {
        let why = format!(
            "rank {rank} may not open the memory of rank {of}, which runs as another user or is not dumpable"
        );
        return (Transport::Tcp, why);
    }
    let away = places.iter().position(|place| place.machine() != places[0].machine());
    match (asked, away) {
        (Transport::Auto, None) => (Transport::Host, "all ranks are on one machine".into()),
        (Transport::Auto, Some(rank)) => {
            (Transport::Host, format!("rank {rank} is on another machine than rank 0"))
        }
        _ => (asked, "it was asked for".into()),
    }
}

/// A rank that may not open the memory of another on its machine.
fn shut_out(places: &[Place]) -> Option<(Rank, Rank)> {
    let ranks = || places.iter().enumerate();
    ranks().find_map(|(rank, place)| {
        let shut = |of: &Place| of.machine() == place.machine() && !place.may_open(of);
        ranks().find_map(|(of, other)| shut(other).then_some((rank, of)))
    })
}

/// Which machine this is, or which container that shares no processes with another.
pub(crate) fn machine() -> Result<String> {
    Ok(format!("{} {}", boot_id()?, namespace("pid")?))
}

fn boot_id() -> Result<String> {
    let boot_id = fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .map_err(|error| Error::io("reading the machine's boot id", &error))?;
    Ok(boot_id.trim().to_owned())
}

fn namespace(kind: &str) -> Result<String> {
    let link = fs::read_link(format!("/proc/self/ns/{kind}"))
        .map_err(|error| Error::io(format!("reading the {kind} namespace"), &error))?;
    Ok(link.to_string_lossy().into_owned())
}

impl Place {
    fn of_this_process(store: &dyn Store, options: &GroupOptions) -> Result<Self> {
        Ok(Self {
            pid: std::process::id(),
            boot_id: boot_id()?,
            pid_namespace: namespace("pid")?,
            host_id: options.host_id.clone(),
            access: Access::of_this_process()?,
            net_namespace: namespace("net")?,
            ip: store.local_ip(),
            shared: Record::new(),
            cuda: options.cuda_device,
            npu: options.npu_device,
            here: Here::default(),
        })
    }

    fn may_open(&self, other: &Self) -> bool {
        let (own, theirs) = (&self.access, &other.access);
        self.pid == other.pid || own.all || (theirs.dumpable && own.user == theirs.user)
    }

    /// Its device for a transport.
    pub(crate) fn device(&self, transport: Transport) -> Option<u32> {
        if transport == Transport::Nccl { self.cuda } else { self.npu }
    }

    /// Why it has not the transport's library, if it has not.
    pub(crate) fn lacks(&self, transport: Transport) -> Option<&String> {
        match transport {
            Transport::Nccl => self.here.nccl.as_ref().err(),
            _ => self.here.hccl.as_ref().err(),
        }
    }

    /// What ranks have in common that can share memory.
    pub(crate) fn machine(&self) -> (&str, &str, Option<&str>) {
        (&self.boot_id, &self.pid_namespace, self.host_id.as_deref())
    }

    /// Whether two ranks run on the same cores, whatever else keeps them apart.
    pub(crate) fn same_cores(&self, other: &Self) -> bool {
        self.boot_id == other.boot_id
    }

    /// Whether two ranks have the same interfaces, the loopback among them.
    pub(crate) fn same_network(&self, other: &Self) -> bool {
        (&self.boot_id, &self.net_namespace) == (&other.boot_id, &other.net_namespace)
    }
}

impl Access {
    fn of_this_process() -> Result<Self> {
        let status = fs::read_to_string("/proc/thread-self/status")
            .map_err(|error| Error::io("reading this thread's user and capabilities", &error))?;
        let field = |name: &str, at: usize, radix: u32| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            u64::from_str_radix(line.split_whitespace().nth(at)?, radix).ok()
        };
        // The effective user; CAP_DAC_OVERRIDE and CAP_SYS_PTRACE.
        let user = field("Uid:", 1, 10).unwrap_or(0);
        let capabilities = field("CapEff:", 0, 16).unwrap_or(0);
        let all = [1, 19].iter().all(|bit| capabilities >> bit & 1 == 1);
        Ok(Self { user, dumpable: sys::is_dumpable(), all })
    }
}

impl Joining<'_> {
    pub(crate) fn world(&self) -> usize {
        self.places.len()
    }

    /// For texts.
    pub(crate) fn group(&self) -> String {
        format!("group {}", self.options.name)
    }

    /// Sets a key that the others read while they join.
    pub(crate) fn set(&self, key: String, value: &[u8]) -> Result<()> {
        self.store.set(&key, value)?;
        self.said.lock().push(key);
        Ok(())
    }

    /// All ranks have joined, so nobody reads again what this one has said to them. A store that does not
    /// answer may have ended with rank 0, and its keys with it.
    pub(crate) fn forget(&self) {
        let said = std::mem::take(&mut *self.said.lock());
        drop(said.iter().try_for_each(|key| self.store.delete_key(key).map(drop)));
    }

    /// Which ranks have not said anything, each under its name, or why the store cannot tell.
    fn absent(&self, name: impl Fn(Rank) -> String, error: Error) -> Error {
        // A store that does not answer is not asked which rank is missing.
        let Error::KeyTimeout { keys, .. } = &error else { return error };
        // All may have said it, and rank 0 has not passed it on.
        let is_rank_0s = keys.iter().any(|key| key.ends_with("/all"));
        let names: Vec<_> = (0..self.world()).map(name).collect();
        let names: Vec<_> = names.iter().map(String::as_str).collect();
        let op = format!("joining {}", self.group());
        let waited = self.options.timeout;
        match missing(&names, &mut |names| self.store.check(names)) {
            Ok(missing) if missing.is_empty() && is_rank_0s => {
                Error::Timeout { op, waited, missing: vec![0] }
            }
            Ok(missing) if missing.is_empty() => error,
            Ok(missing) => Error::Timeout { op, waited, missing },
            Err(error) => error,
        }
    }

    /// A rank ended that has said where it is.
    pub(crate) fn died(&self, rank: Rank) -> Error {
        let op = format!("joining {}", self.group());
        Error::PeerDied { op, rank, pid: self.places[rank].pid }
    }

    /// Ranks did not come before the deadline.
    pub(crate) fn timeout(&self, what: &str, missing: Vec<Rank>) -> Error {
        let op = format!("joining {}: {what}", self.group());
        Error::Timeout { op, waited: self.options.timeout, missing }
    }
}

/// Tells all ranks where this one is, and hears where they are; by rank. Rank 0 reads one record after
/// another, up to the first whose configuration differs from its own: ranks that differ in the world size
/// do not wait for one that nobody starts.
fn tell_places(joining: &Joining<'_>, own: &Place) -> Result<Vec<Place>> {
    #[derive(Deserialize)]
    struct Member {
        #[serde(default)]
        shared: Record,
    }
    let Joining { store, rank, options, deadline, .. } = *joining;
    let key = format!("{}/place", options.name);
    let left = || deadline.saturating_duration_since(Instant::now());
    let of_rank = |rank: Rank| format!("{key}/{rank}");
    let absent = |error| joining.absent(of_rank, error);
    let record = |(rank, json): (Rank, &Vec<u8>)| {
        let member: Member = serde_json::from_slice(json).map_err(|_| garbled(rank))?;
        Ok(member.shared)
    };
    let json = serde_json::to_vec(own).expect("plain numbers and strings");
    joining.set(of_rank(rank), &json)?;
    let mut said = Vec::new();
    if rank == 0 {
        for rank in 0..joining.world() {
            said.push(store.get(&of_rank(rank), left()).map_err(absent)?);
            if record((rank, &said[rank])).ok().as_ref() != Some(&own.shared) {
                break;
            }
        }
        joining.set(format!("{key}/all"), &join_values(&said))?;
    } else {
        let all = store.get(&format!("{key}/all"), left()).map_err(absent)?;
        said = split_values(&all).ok_or_else(|| garbled(0))?;
    }
    let records: Vec<Record> = said.iter().enumerate().map(record).collect::<Result<_>>()?;
    let op = format!("joining {}", joining.group());
    if let Err(error) = joining.shared.compare(rank, &records, &op) {
        let heard = |rank| format!("{key}/heard/{rank}");
        // Whether it is heard or not, the ranks disagree.
        drop(match rank {
            0 => {
                let others: Vec<_> = (1..joining.world()).map(heard).collect();
                let others: Vec<_> = others.iter().map(String::as_str).collect();
                store.wait(&others, HEARD.min(left()))
            }
            rank => store.set(&heard(rank), b""),
        });
        return Err(error);
    }
    if said.len() != joining.world() {
        return Err(garbled(0));
    }
    from_json(&said)
}

/// Tells all ranks something under a name, and hears what they tell; by rank.
pub(crate) fn tell_all<T: Serialize + DeserializeOwned>(
    joining: &Joining<'_>,
    what: &str,
    own: &T,
) -> Result<Vec<T>> {
    let Joining { store, rank, options, deadline, .. } = *joining;
    let key = format!("{}/{what}", options.name);
    let json = serde_json::to_vec(own).expect("plain numbers and strings");
    let left = deadline.saturating_duration_since(Instant::now());
    let mut said = joining.said.lock();
    said.push(format!("{key}/{rank}"));
    said.extend((rank == 0).then(|| format!("{key}/all")));
    drop(said);
    let all = exchange(store, &key, rank, joining.world(), &json, left);
    from_json(&all.map_err(|error| joining.absent(|rank| format!("{key}/{rank}"), error))?)
}

/// Tells each rank what is for it alone under a name, and hears what each has for this one; by rank.
#[cfg(feature = "gloo")]
pub(crate) fn tell_each<T: Serialize + DeserializeOwned>(
    joining: &Joining<'_>,
    what: &str,
    own: &[T],
) -> Result<Vec<T>> {
    let Joining { store, rank, options, deadline, .. } = *joining;
    let name = |from: Rank, to: Rank| format!("{}/{what}/{from}/{to}", options.name);
    let json = |own| serde_json::to_vec(own).expect("plain numbers and strings");
    let said: Vec<_> =
        own.iter().enumerate().map(|(to, own)| (name(rank, to), json(own))).collect();
    let pairs: Vec<_> = said.iter().map(|(name, json)| (name.as_str(), &json[..])).collect();
    store.multi_set(&pairs)?;
    joining.said.lock().extend(said.iter().map(|(name, _)| name.clone()));
    let names: Vec<_> = (0..joining.world()).map(|from| name(from, rank)).collect();
    let names: Vec<_> = names.iter().map(String::as_str).collect();
    let all = store.multi_get(&names, deadline.saturating_duration_since(Instant::now()));
    from_json(&all.map_err(|error| joining.absent(|from| name(from, rank), error))?)
}

fn from_json<T: DeserializeOwned>(all: &[Vec<u8>]) -> Result<Vec<T>> {
    let read =
        |(rank, json): (Rank, &Vec<u8>)| serde_json::from_slice(json).map_err(|_| garbled(rank));
    all.iter().enumerate().map(read).collect()
}

pub(crate) fn garbled(rank: Rank) -> Error {
    Error::InvalidArgument(format!("what rank {rank} says of itself in the store is garbled"))
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;

    pub(crate) fn places(count: usize) -> Vec<Place> {
        let store = crate::MemoryStore::new();
        let options = GroupOptions::default();
        let place = || Place::of_this_process(&store, &options).unwrap();
        std::iter::repeat_with(place).take(count).collect()
    }

    #[test]
    fn one_machine_and_several_are_host_unless_asked_otherwise() {
        let mut places = places(3);
        assert_eq!(choose(Transport::Auto, &places).0, Transport::Host);
        assert_eq!(choose(Transport::Tcp, &places).0, Transport::Tcp);
        places[2].host_id = Some("elsewhere".into());
        let (chosen, why) = choose(Transport::Auto, &places);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("rank 2"), "{why}");
        assert_eq!(choose(Transport::Host, &places).0, Transport::Host);
    }

    #[test]
    fn ranks_that_may_not_open_one_anothers_memory_are_tcp_unless_asked_otherwise() {
        let mut places = places(3);
        for (pid, place) in places.iter_mut().enumerate() {
            (place.pid, place.access) =
                (pid as u32, Access { user: 1, dumpable: true, all: false });
        }
        assert_eq!(choose(Transport::Auto, &places).0, Transport::Host);
        let whole = places.clone();
        places[1].access.dumpable = false;
        let (chosen, why) = choose(Transport::Auto, &places);
        assert_eq!(chosen, Transport::Tcp);
        assert!(why.starts_with("rank 0 may not open the memory of rank 1"), "{why}");
        assert_eq!(choose(Transport::Host, &places).0, Transport::Host);
        places.iter_mut().for_each(|place| place.access.all = true);
        assert_eq!(choose(Transport::Auto, &places).0, Transport::Host);
        places = whole;
        places[2].access.user = 2;
        assert_eq!(choose(Transport::Auto, &places).0, Transport::Tcp);
        // On a machine of its own nobody opens it.
        places[2].host_id = Some("elsewhere".into());
        assert_eq!(choose(Transport::Auto, &places).0, Transport::Host);
    }

    #[test]
    fn devices_and_nccl_on_all_ranks_are_nccl_unless_asked_otherwise() {
        let mut places = places(3);
        for place in &mut places {
            (place.cuda, place.here.nccl) = (Some(0), Ok(22707));
        }
        let (chosen, why) = choose(Transport::Auto, &places);
        assert_eq!(chosen, Transport::Nccl);
        assert!(why.contains("all ranks have a CUDA device and NCCL"), "{why}");
        assert_eq!(choose(Transport::Host, &places).0, Transport::Host);
        places[1].here.nccl = Err("no libnccl".into());
        let (chosen, why) = choose(Transport::Auto, &places);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("rank 1 cannot use NCCL: no libnccl"), "{why}");
        assert_eq!(choose(Transport::Nccl, &places).0, Transport::Nccl);
        places[0].cuda = None;
        let (chosen, why) = choose(Transport::Auto, &places);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("rank 0 gives no CUDA device"), "{why}");
    }

    #[test]
    fn npus_and_hccl_on_all_ranks_are_hccl_unless_asked_otherwise() {
        let mut places = places(3);
        for place in &mut places {
            (place.npu, place.here.hccl) = (Some(0), Ok(()));
        }
        let (chosen, why) = choose(Transport::Auto, &places);
        assert_eq!((chosen, &why[..]), (Transport::Hccl, "all ranks have an NPU and HCCL"));
        assert_eq!(choose(Transport::Host, &places).0, Transport::Host);
        // Of two kinds of devices the one that all have.
        places[1].cuda = Some(0);
        assert_eq!(choose(Transport::Auto, &places).0, Transport::Hccl);
        places[2].here.hccl = Err("no libhccl".into());
        let (chosen, why) = choose(Transport::Auto, &places);
        assert_eq!(chosen, Transport::Host);
        assert!(why.contains("not NCCL because rank 0 gives no CUDA device"), "{why}");
        assert!(why.contains("not HCCL because rank 2 cannot use HCCL: no libhccl"), "{why}");
        assert_eq!(choose(Transport::Hccl, &places).0, Transport::Hccl);
    }

    /// A store that takes the whole timeout to answer nothing.
    #[derive(Debug, Default)]
    struct Stalled {
        asked: std::sync::atomic::AtomicU32,
    }

    impl Stalled {
        fn fail<T>(&self) -> Result<T> {
            self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let [store, during, reason] = ["s", "any", "no answer"].map(String::from);
            Err(Error::Store { store, during, reason })
        }
    }

    impl Store for Stalled {
        fn set(&self, _: &str, _: &[u8]) -> Result<()> {
            self.fail()
        }
        fn get(&self, _: &str, _: Duration) -> Result<Vec<u8>> {
            self.fail()
        }
        fn add(&self, _: &str, _: i64) -> Result<i64> {
            self.fail()
        }
        fn compare_set(&self, _: &str, _: &[u8], _: &[u8]) -> Result<Vec<u8>> {
            self.fail()
        }
        fn wait(&self, _: &[&str], _: Duration) -> Result<()> {
            self.fail()
        }
        fn check(&self, _: &[&str]) -> Result<bool> {
            self.fail()
        }
        fn delete_key(&self, _: &str) -> Result<bool> {
            self.fail()
        }
        fn num_keys(&self) -> Result<i64> {
            self.fail()
        }
    }

    /// Counts what each rank asks of it; waits, of which there are more the longer they take, aside.
    #[derive(Debug)]
    struct Counting {
        store: crate::MemoryStore,
        asked: Arc<std::sync::atomic::AtomicUsize>,
    }

    impl Counting {
        fn count(&self) -> &crate::MemoryStore {
            self.asked.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            &self.store
        }
    }

    impl Store for Counting {
        fn set(&self, key: &str, value: &[u8]) -> Result<()> {
            self.count().set(key, value)
        }
        fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
            self.count().get(key, timeout)
        }
        fn add(&self, key: &str, delta: i64) -> Result<i64> {
            self.count().add(key, delta)
        }
        fn compare_set(&self, key: &str, expected: &[u8], desired: &[u8]) -> Result<Vec<u8>> {
            self.count().compare_set(key, expected, desired)
        }
        fn wait(&self, keys: &[&str], timeout: Duration) -> Result<()> {
            self.store.wait(keys, timeout)
        }
        fn check(&self, keys: &[&str]) -> Result<bool> {
            self.count().check(keys)
        }
        fn delete_key(&self, key: &str) -> Result<bool> {
            self.count().delete_key(key)
        }
        fn num_keys(&self) -> Result<i64> {
            self.count().num_keys()
        }
        fn multi_get(&self, keys: &[&str], timeout: Duration) -> Result<Vec<Vec<u8>>> {
            self.count().multi_get(keys, timeout)
        }
    }

    #[test]
    fn what_is_asked_of_the_store_grows_with_the_ranks_and_not_with_their_square() {
        let asked = |world: usize| {
            let asked = Arc::new(std::sync::atomic::AtomicUsize::new(0));
            let store = crate::MemoryStore::new();
            std::thread::scope(|scope| {
                for rank in 0..world {
                    let store = Counting { store: store.clone(), asked: Arc::clone(&asked) };
                    scope.spawn(move || {
                        let options = GroupOptions::default();
                        let (here, shared) = (Here::default(), SharedConfig::new(world, &options));
                        let joining = gather(&store, rank, world, &options, here, shared).unwrap();
                        assert_eq!(joining.places.len(), world);
                        let told = tell_all(&joining, "number", &rank).unwrap();
                        assert_eq!(told, (0..world).collect::<Vec<_>>());
                    });
                }
            });
            asked.load(std::sync::atomic::Ordering::Relaxed)
        };
        let (few, more, many) = (asked(4), asked(14), asked(24));
        assert_eq!(many - more, more - few, "ten further ranks ask as much, whoever is there");
    }

    #[test]
    fn rank_0_is_missing_if_it_has_spoken_but_not_passed_on_what_all_said() {
        let (store, timeout) = (crate::MemoryStore::new(), Duration::from_millis(20));
        store.set("default/place/0", b"{}").unwrap();
        let options = GroupOptions::default().with_timeout(timeout);
        let shared = SharedConfig::new(2, &options);
        let error = gather(&store, 1, 2, &options, Here::default(), shared).unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [0]), "{error}");
    }

    #[test]
    fn a_store_that_does_not_answer_is_asked_once() {
        let (store, options) = (Stalled::default(), GroupOptions::default());
        let joining = Joining {
            store: &store,
            rank: 0,
            options: &options,
            deadline: Instant::now(),
            shared: SharedConfig::new(200, &options),
            places: places(200),
            said: Mutex::default(),
        };
        let error = joining.absent(|_| "key".into(), store.fail::<()>().unwrap_err());
        assert!(matches!(error, Error::Store { .. }), "{error}");
        assert_eq!(store.asked.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}
