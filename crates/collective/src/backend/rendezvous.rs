//! Rendezvous: the ranks of a group exchange records through the store.
//!
//! Each rank writes its location and its [configuration](super::shared_config) to the store. Every
//! rank reads all records, so all make the same [choice of a transport](super::transport) or fail
//! with the same error. Rank 0 gathers the records and publishes them together, so the number of
//! requests is linear in the number of ranks.

use std::fs;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::process::{DumpableBehavior, dumpable_behavior, getegid, geteuid};
use rustix::thread::{CapabilitySet, capabilities};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::shared_config::{Record, SharedConfig};
use crate::store::{
    FAILED, FAILURE_GRACE, Store, check_failed, deadline, exchange, join_values, missing,
    split_values, watch_interval,
};
use crate::{Error, GroupOptions, Rank, Result, Transport};

/// Time that rank 0, which may host the store, waits for all ranks to read the mismatch.
const ACK_TIMEOUT: Duration = Duration::from_secs(3);

/// A rank that joins a group, and the records of the others.
#[derive(Debug)]
pub(crate) struct Joining<'a> {
    pub(crate) store: &'a dyn Store,
    pub(crate) rank: Rank,
    pub(crate) options: &'a GroupOptions,
    pub(crate) deadline: Instant,
    pub(crate) shared: SharedConfig,
    /// By rank.
    pub(crate) locations: Vec<RankLocation>,
    /// Keys that this rank has set, to be deleted once all ranks have joined.
    pub(crate) own_keys: Mutex<Vec<String>>,
}

/// A rank's process, machine, network and devices.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RankLocation {
    pub(crate) pid: u32,
    /// Identifies the machine and its boot.
    boot_id: String,
    pid_namespace: String,
    pub(super) host_id: Option<String>,
    pub(super) access: PtraceAccess,
    net_namespace: String,
    /// Local address of its connection to the store.
    pub(crate) ip: Option<IpAddr>,
    shared: Record,
    pub(crate) nccl: DeviceSupport,
    pub(crate) hccl: DeviceSupport,
}

/// Which processes may open a process's memory, and whose memory it may open: `ptrace(2)`, "Ptrace
/// access mode checking".
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct PtraceAccess {
    /// Effective user and group.
    pub(super) user: (u32, u32),
    /// Whether processes of the same user may open its memory.
    pub(super) dumpable: bool,
    /// Whether its capabilities let it open any process's memory.
    pub(super) all: bool,
}

/// A rank's device of one kind, and its library.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct DeviceSupport {
    /// The device of the group's options.
    pub(crate) index: Option<u32>,
    /// The library's version, 0 for HCCL, or why the rank cannot use it: "gives no NPU".
    pub(crate) library: std::result::Result<i32, String>,
}

/// Returns the version of this process's library for a transport, 0 for HCCL, or why it has none.
pub(crate) type FindLibrary<'a> = &'a dyn Fn(Transport) -> std::result::Result<i32, String>;

/// Exchanges the locations of all ranks. The store must hold no keys of another group of the same
/// name.
pub(crate) fn exchange_locations<'a>(
    store: &'a dyn Store,
    rank: Rank,
    world_size: usize,
    options: &'a GroupOptions,
    library: FindLibrary<'_>,
    shared: SharedConfig,
) -> Result<Joining<'a>> {
    check_rank(rank, world_size)?;
    let deadline = deadline(options.timeout);
    let own = RankLocation::of_this_process(store, options, library)?;
    let own = RankLocation { shared: shared.record(), ..own };
    let locations = vec![own.clone(); world_size];
    let own_keys = Mutex::default();
    let mut joining = Joining { store, rank, options, deadline, shared, locations, own_keys };
    joining.locations = gather_locations(&joining, &own)?;
    Ok(joining)
}

/// Checks that `rank` is below `world_size`.
pub(crate) fn check_rank(rank: Rank, world_size: usize) -> Result<()> {
    if rank < world_size {
        return Ok(());
    }
    Err(Error::InvalidArgument(format!("rank {rank} is not below world size {world_size}")))
}

/// Finds a rank that may not open the memory of another on its machine; returns both.
pub(crate) fn find_inaccessible(locations: &[RankLocation]) -> Option<(Rank, Rank)> {
    let ranks = || locations.iter().enumerate();
    ranks().find_map(|(rank, location)| {
        let denied =
            |of: &RankLocation| of.machine() == location.machine() && !location.may_open(of);
        ranks().find_map(|(of, other)| denied(other).then_some((rank, of)))
    })
}

/// Identifies this machine, or this container if it has its own PID namespace.
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

impl RankLocation {
    fn of_this_process(
        store: &dyn Store,
        options: &GroupOptions,
        library: FindLibrary<'_>,
    ) -> Result<Self> {
        Ok(Self {
            pid: std::process::id(),
            boot_id: boot_id()?,
            pid_namespace: namespace("pid")?,
            host_id: options.host_id.clone(),
            access: PtraceAccess::of_this_process()?,
            net_namespace: namespace("net")?,
            ip: store.local_ip(),
            shared: Record::new(),
            nccl: DeviceSupport::of_this_process(Transport::Nccl, options, library),
            hccl: DeviceSupport::of_this_process(Transport::Hccl, options, library),
        })
    }

    fn may_open(&self, other: &Self) -> bool {
        let (own, theirs) = (&self.access, &other.access);
        self.pid == other.pid || own.all || (theirs.dumpable && own.user == theirs.user)
    }

    pub(crate) fn support(&self, transport: Transport) -> &DeviceSupport {
        if transport == Transport::Nccl { &self.nccl } else { &self.hccl }
    }

    /// Returns the identity of the machine, equal for ranks that can share memory.
    pub(crate) fn machine(&self) -> (&str, &str, Option<&str>) {
        (&self.boot_id, &self.pid_namespace, self.host_id.as_deref())
    }

    /// Returns whether two ranks run on the same cores, perhaps in different containers.
    pub(crate) fn same_cores(&self, other: &Self) -> bool {
        self.boot_id == other.boot_id
    }

    /// Returns whether two ranks have the same network interfaces, including the loopback.
    pub(crate) fn same_network(&self, other: &Self) -> bool {
        (&self.boot_id, &self.net_namespace) == (&other.boot_id, &other.net_namespace)
    }
}

impl DeviceSupport {
    /// Returns the device of the options for a transport, and whether this process has its library;
    /// without a device, the library is needed only if the transport is requested.
    fn of_this_process(
        transport: Transport,
        options: &GroupOptions,
        library: FindLibrary<'_>,
    ) -> Self {
        let (index, device) = match transport {
            Transport::Nccl => (options.cuda_device, "CUDA device"),
            _ => (options.npu_device, "NPU"),
        };
        let library = match index.is_none() && options.transport != transport {
            true => Err(format!("gives no {device}")),
            false => library(transport),
        };
        Self { index, library }
    }
}

impl PtraceAccess {
    fn of_this_process() -> Result<Self> {
        let sets = capabilities(None)
            .map_err(|error| Error::io("reading this thread's capabilities", &error.into()))?;
        let all = CapabilitySet::DAC_OVERRIDE | CapabilitySet::SYS_PTRACE;
        let user = (geteuid().as_raw(), getegid().as_raw());
        let dumpable = dumpable_behavior() == Ok(DumpableBehavior::Dumpable);
        Ok(Self { user, dumpable, all: sets.effective.contains(all) })
    }
}

impl Joining<'_> {
    pub(crate) fn world(&self) -> usize {
        self.locations.len()
    }

    /// Returns the group's name for error texts.
    pub(crate) fn group(&self) -> String {
        format!("group {}", self.options.name)
    }

    /// Sets a key that the other ranks read while they join.
    pub(crate) fn set(&self, key: String, value: &[u8]) -> Result<()> {
        self.store.set(&key, value)?;
        self.own_keys.lock().push(key);
        Ok(())
    }

    /// Fails if another rank has failed to join; for ranks that wait for it elsewhere than at the
    /// store.
    pub(crate) fn check_failed(&self) -> Result<()> {
        check_failed(self.store)
    }

    /// Returns why another rank has failed, if it publishes that soon, else `error`, of a file that
    /// a peer offers: a rank that fails closes its files first, and their numbers may be other
    /// files' then.
    pub(crate) fn reason_or(&self, error: Error) -> Error {
        let left = self.deadline.saturating_duration_since(Instant::now());
        drop(self.store.try_wait(&[FAILED], FAILURE_GRACE.min(left)));
        self.check_failed().err().unwrap_or(error)
    }

    /// Returns the interval at which a waiting rank calls [`check_failed`](Self::check_failed).
    pub(crate) fn watch_interval(&self) -> Duration {
        watch_interval(self.world())
    }

    /// Deletes this rank's keys. All ranks have joined, so none reads them again. Errors are
    /// ignored: the store may have ended with rank 0.
    pub(crate) fn delete_own_keys(&self) {
        let keys = std::mem::take(&mut *self.own_keys.lock());
        drop(keys.iter().try_for_each(|key| self.store.delete_key(key).map(drop)));
    }

    /// Turns a timeout of the store into one that names the ranks whose key, `key_of(rank)`, is
    /// missing.
    fn name_missing(&self, key_of: impl Fn(Rank) -> String, error: Error) -> Error {
        // A store that does not respond cannot tell which rank is missing.
        let Error::KeyTimeout { keys, .. } = &error else { return error };
        // All ranks may have written their records, but rank 0 has not published them.
        let waits_for_rank_0 = keys.iter().any(|key| key.ends_with("/all"));
        let keys: Vec<_> = (0..self.world()).map(key_of).collect();
        let keys: Vec<_> = keys.iter().map(String::as_str).collect();
        let op = format!("joining {}", self.group());
        let waited = self.options.timeout;
        match missing(&keys, &mut |keys| self.store.check(keys)) {
            Ok(missing) if missing.is_empty() && waits_for_rank_0 => {
                Error::Timeout { op, waited, missing: vec![0] }
            }
            Ok(missing) if missing.is_empty() => error,
            Ok(missing) => Error::Timeout { op, waited, missing },
            Err(error) => error,
        }
    }

    /// Error for a rank that ended after it wrote its location.
    pub(crate) fn died(&self, rank: Rank) -> Error {
        let op = format!("joining {}", self.group());
        Error::PeerDied { op, rank, pid: self.locations[rank].pid }
    }

    /// Error for a rank whose place another process or thread has, although the store let both
    /// join.
    pub(crate) fn duplicate(&self) -> Error {
        let (group, by) = (self.options.name.clone(), "another process or thread".to_owned());
        Error::DuplicateRank { group, rank: self.rank, by }
    }

    /// Error for ranks that did not arrive before the deadline.
    pub(crate) fn timeout(&self, what: &str, missing: Vec<Rank>) -> Error {
        let op = format!("joining {}: {what}", self.group());
        Error::Timeout { op, waited: self.options.timeout, missing }
    }
}

/// All-gathers the locations. Rank 0 reads one record after another, up to the first whose
/// configuration differs from its own, so a mismatch of the world size does not wait for a rank
/// that is never started.
fn gather_locations(joining: &Joining<'_>, own: &RankLocation) -> Result<Vec<RankLocation>> {
    #[derive(Deserialize)]
    struct Config {
        #[serde(default)]
        shared: Record,
    }
    let Joining { store, rank, options, deadline, .. } = *joining;
    let key = format!("{}/place", options.name);
    let left = || deadline.saturating_duration_since(Instant::now());
    let (key_of, all_key) = (|rank: Rank| format!("{key}/{rank}"), format!("{key}/all"));
    let name_missing = |error| joining.name_missing(key_of, error);
    let config = |(rank, json): (Rank, &Vec<u8>)| {
        let config: Config =
            serde_json::from_slice(json).map_err(|_| malformed_record(rank, key_of(rank)))?;
        Ok(config.shared)
    };
    let json = serde_json::to_vec(own).expect("plain numbers and strings");
    joining.set(key_of(rank), &json)?;
    let mut all = Vec::new();
    if rank == 0 {
        for rank in 0..joining.world() {
            all.push(store.get(&key_of(rank), left()).map_err(name_missing)?);
            if config((rank, &all[rank])).ok().as_ref() != Some(&own.shared) {
                break;
            }
        }
        joining.set(all_key.clone(), &join_values(&all))?;
    } else {
        let joined = store.get(&all_key, left()).map_err(name_missing)?;
        all = split_values(&joined).ok_or_else(|| malformed_record(0, all_key.clone()))?;
    }
    let configs: Vec<Record> = all.iter().enumerate().map(config).collect::<Result<_>>()?;
    let op = format!("joining {}", joining.group());
    if let Err(error) = joining.shared.compare(rank, &configs, &op) {
        let ack_key = |rank| format!("{key}/heard/{rank}");
        // Ignored: the mismatch is returned either way.
        drop(match rank {
            0 => {
                let others: Vec<_> = (1..joining.world()).map(ack_key).collect();
                let others: Vec<_> = others.iter().map(String::as_str).collect();
                store.wait(&others, ACK_TIMEOUT.min(left()))
            }
            rank => store.set(&ack_key(rank), b""),
        });
        return Err(error);
    }
    if all.len() != joining.world() {
        return Err(malformed_record(0, all_key));
    }
    from_json(&all, key_of)
}

/// All-gathers one record per rank under the key `what`; returns them in rank order.
pub(crate) fn all_gather_records<T: Serialize + DeserializeOwned>(
    joining: &Joining<'_>,
    what: &str,
    own: &T,
) -> Result<Vec<T>> {
    let Joining { store, rank, options, deadline, .. } = *joining;
    let key = format!("{}/{what}", options.name);
    let json = serde_json::to_vec(own).expect("plain numbers and strings");
    let left = deadline.saturating_duration_since(Instant::now());
    let key_of = |rank| format!("{key}/{rank}");
    let mut own_keys = joining.own_keys.lock();
    own_keys.push(key_of(rank));
    own_keys.extend((rank == 0).then(|| format!("{key}/all")));
    drop(own_keys);
    let all = exchange(store, &key, rank, joining.world(), &json, left);
    from_json(&all.map_err(|error| joining.name_missing(key_of, error))?, key_of)
}

/// Sends record `own[i]` to rank `i` under the key `what`; returns the records for this rank, in
/// rank order.
#[cfg(feature = "gloo")]
pub(crate) fn all_to_all_records<T: Serialize + DeserializeOwned>(
    joining: &Joining<'_>,
    what: &str,
    own: &[T],
) -> Result<Vec<T>> {
    let Joining { store, rank, options, deadline, .. } = *joining;
    let key = |from: Rank, to: Rank| format!("{}/{what}/{from}/{to}", options.name);
    let json = |own| serde_json::to_vec(own).expect("plain numbers and strings");
    let sent: Vec<_> = own.iter().enumerate().map(|(to, own)| (key(rank, to), json(own))).collect();
    let pairs: Vec<_> = sent.iter().map(|(key, json)| (key.as_str(), &json[..])).collect();
    store.multi_set(&pairs)?;
    joining.own_keys.lock().extend(sent.iter().map(|(key, _)| key.clone()));
    let key_from = |from| key(from, rank);
    let keys: Vec<_> = (0..joining.world()).map(key_from).collect();
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    let all = store.multi_get(&keys, deadline.saturating_duration_since(Instant::now()));
    from_json(&all.map_err(|error| joining.name_missing(key_from, error))?, key_from)
}

fn from_json<T: DeserializeOwned>(
    all: &[Vec<u8>],
    key_of: impl Fn(Rank) -> String,
) -> Result<Vec<T>> {
    let read = |(rank, json): (Rank, &Vec<u8>)| {
        serde_json::from_slice(json).map_err(|_| malformed_record(rank, key_of(rank)))
    };
    all.iter().enumerate().map(read).collect()
}

pub(crate) fn malformed_record(rank: Rank, key: String) -> Error {
    Error::MalformedRecord { record: format!("rank {rank}'s rendezvous record"), key }
}

#[cfg(test)]
pub(crate) mod tests {
    use std::time::Duration;

    use super::*;
    use crate::store::tests::CountingStore;

    fn no_library(_: Transport) -> std::result::Result<i32, String> {
        Err("has none".into())
    }

    pub(crate) fn locations(count: usize) -> Vec<RankLocation> {
        let store = crate::MemoryStore::new();
        let options = GroupOptions::default();
        let location = || RankLocation::of_this_process(&store, &options, &no_library).unwrap();
        std::iter::repeat_with(location).take(count).collect()
    }

    /// A store whose requests all fail.
    #[derive(Debug, Default)]
    struct Stalled {
        requests: std::sync::atomic::AtomicU32,
    }

    impl Stalled {
        fn fail<T>(&self) -> Result<T> {
            self.requests.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            let [store, during, reason] = ["s", "any", "no answer"].map(String::from);
            Err(Error::Store { store, during, reason })
        }
    }

    impl Store for Stalled {
        fn set(&self, _: &str, _: &[u8]) -> Result<()> {
            self.fail()
        }
        fn read(&self, _: &[&str]) -> Result<Vec<Vec<u8>>> {
            self.fail()
        }
        fn name(&self) -> String {
            "s".into()
        }
        fn add(&self, _: &str, _: i64) -> Result<i64> {
            self.fail()
        }
        fn compare_set(&self, _: &str, _: &[u8], _: &[u8]) -> Result<Vec<u8>> {
            self.fail()
        }
        fn try_wait(&self, _: &[&str], _: Duration) -> Result<bool> {
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

    #[test]
    fn store_requests_are_linear_in_the_number_of_ranks() {
        let requests = |world: usize| {
            let store = CountingStore::default();
            std::thread::scope(|scope| {
                for rank in 0..world {
                    let store = &store;
                    scope.spawn(move || {
                        let options = GroupOptions::default();
                        let shared = SharedConfig::new(world, &options);
                        let joining =
                            exchange_locations(store, rank, world, &options, &no_library, shared)
                                .unwrap();
                        assert_eq!(joining.locations.len(), world);
                        let records = all_gather_records(&joining, "number", &rank).unwrap();
                        assert_eq!(records, (0..world).collect::<Vec<_>>());
                    });
                }
            });
            store.requests()
        };
        let (few, more, many) = (requests(4), requests(14), requests(24));
        assert_eq!(many - more, more - few, "ten further ranks always add the same number");
    }

    #[test]
    fn rank_0_is_missing_if_it_wrote_its_record_but_did_not_publish_all() {
        let (store, timeout) = (crate::MemoryStore::new(), Duration::from_millis(20));
        store.set("default/place/0", b"{}").unwrap();
        let options = GroupOptions::default().with_timeout(timeout);
        let shared = SharedConfig::new(2, &options);
        let error = exchange_locations(&store, 1, 2, &options, &no_library, shared).unwrap_err();
        assert!(matches!(&error, Error::Timeout { missing, .. } if *missing == [0]), "{error}");
    }

    #[test]
    fn a_failing_store_is_not_asked_which_rank_is_missing() {
        let (store, options) = (Stalled::default(), GroupOptions::default());
        let joining = Joining {
            store: &store,
            rank: 0,
            options: &options,
            deadline: Instant::now(),
            shared: SharedConfig::new(200, &options),
            locations: locations(200),
            own_keys: Mutex::default(),
        };
        let error = joining.name_missing(|_| "key".into(), store.fail::<()>().unwrap_err());
        assert!(matches!(error, Error::Store { .. }), "{error}");
        assert_eq!(store.requests.load(std::sync::atomic::Ordering::Relaxed), 1);
    }
}
