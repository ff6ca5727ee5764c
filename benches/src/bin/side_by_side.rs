//! Our side of `side_by_side/collective.sh`: the all-reduce it times beside the peers', the probe
//! of the machine around each program, and the table.
//!
//! ```text
//! side_by_side all_reduce NAME WORLD BYTES ITERATIONS REPETITIONS TRANSPORT BUFFER
//! side_by_side least BYTES ITERATIONS REPETITIONS
//! side_by_side probe
//! side_by_side table < lines of "BEFORE AFTER NAME WORLD BYTES BEST MEDIAN"
//! side_by_side pairs < the same, each two lines one run after the other
//! ```
//!
//! `all_reduce` starts itself again as the other ranks, checks one sum, and then times, per
//! repetition, a barrier's end to the end of so many calls on the same buffer. It prints
//! `NAME WORLD BYTES BEST MEDIAN` in microseconds a call, as the peers' programs do. Started by
//! `launch`, it is one rank. `least` prints the same for the copies of two ranks alone.

#![expect(clippy::print_stdout, reason = "this program's result is what it prints")]

use std::collections::{BTreeMap, BTreeSet};
use std::error::Error;
use std::hint::{black_box, spin_loop};
use std::process::{Child, Command};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use benches::exchange::Exchange;
use collective::{
    GroupOptions, ProcessGroup, ReduceOp, TcpStore, Topology, Transport, init_process_group,
    store::TcpStoreServer,
};

type Result<T> = std::result::Result<T, Box<dyn Error>>;

/// Tells a process that it is not rank 0: `RANK:PORT`.
const RANK_VARIABLE: &str = "SIDE_BY_SIDE_RANK";
const TIMEOUT: Duration = Duration::from_secs(120);
/// Rounds of a probe: some milliseconds.
const PINGS: u32 = 20_000;
/// A cache line passed one way in less than this many nanoseconds: the two cores are near.
const NEAR_NS: f64 = 100.0;

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        ["all_reduce", task @ ..] => Task::parse(task)?.run(),
        ["least", bytes, iterations, repetitions] => {
            least(parse(bytes)?, parse(iterations)?, parse(repetitions)?);
            Ok(())
        }
        ["probe"] => {
            println!("{:.0}", probe());
            Ok(())
        }
        ["table"] => {
            print!("{}", table(&std::io::read_to_string(std::io::stdin())?)?);
            Ok(())
        }
        ["pairs"] => {
            print!("{}", pairs(&std::io::read_to_string(std::io::stdin())?)?);
            Ok(())
        }
        _ => {
            Err("usage: side_by_side all_reduce|least|probe|table|pairs ...; see the head of its source"
                .into())
        }
    }
}

/// The measured operation, its world and its buffers.
struct Task {
    name: String,
    world: usize,
    bytes: usize,
    iterations: u32,
    repetitions: usize,
    transport: String,
    shared: bool,
}

impl Task {
    fn parse(args: &[&str]) -> Result<Self> {
        let &[name, world, bytes, iterations, repetitions, transport, buffer] = args else {
            return Err("NAME WORLD BYTES ITERATIONS REPETITIONS TRANSPORT BUFFER".into());
        };
        let shared = match buffer {
            "own" => false,
            "shared" => true,
            _ => return Err(format!("a buffer is own or shared, not {buffer}").into()),
        };
        Ok(Self {
            name: name.into(),
            world: parse(world)?,
            bytes: parse(bytes)?,
            iterations: parse::<u32>(iterations)?.max(1),
            repetitions: parse::<usize>(repetitions)?.max(1),
            transport: transport.into(),
            shared,
        })
    }

    fn run(&self) -> Result<()> {
        if std::env::var_os("LOCAL_RANK").is_some() {
            let topology = Topology::from_env(|name| std::env::var(name).ok())?;
            let group = init_process_group(&topology, self.options(topology.rank)?)?;
            let times = self.time(&group)?;
            if topology.rank == 0 {
                print(&self.name, self.world, self.bytes, times);
            }
            return Ok(());
        }
        if let Ok(role) = std::env::var(RANK_VARIABLE) {
            let (rank, port) = role.split_once(':').ok_or("RANK:PORT")?;
            self.time(&self.join(parse(rank)?, parse(port)?)?)?;
            return Ok(());
        }
        let server = TcpStoreServer::bind("127.0.0.1:0".parse()?)?;
        let program = std::env::current_exe()?;
        let start = |rank: usize| {
            let mut command = Command::new(&program);
            command.args(std::env::args().skip(1));
            command.env(RANK_VARIABLE, format!("{rank}:{}", server.port())).spawn().map(Rank)
        };
        let ranks: Vec<Rank> = (1..self.world).map(start).collect::<std::io::Result<_>>()?;
        let times = self.time(&self.join(0, server.port())?)?;
        for mut rank in ranks {
            let status = rank.0.wait()?;
            if !status.success() {
                return Err(format!("a rank ended with {status}").into());
            }
        }
        print(&self.name, self.world, self.bytes, times);
        Ok(())
    }

    fn join(&self, rank: usize, port: u16) -> Result<ProcessGroup> {
        let store = Arc::new(TcpStore::connect("127.0.0.1", port, TIMEOUT)?);
        Ok(ProcessGroup::from_store(store, rank, self.world, self.options(rank)?)?)
    }

    fn options(&self, rank: usize) -> Result<GroupOptions> {
        let options = GroupOptions::default().with_timeout(TIMEOUT);
        Ok(match self.transport.as_str() {
            "shm" => options.with_transport(Transport::Host),
            "tcp" => options.with_transport(Transport::Tcp),
            // The launcher's node, or two, each with half of the ranks, joined by the loopback.
            "machines" => {
                let node = std::env::var("GROUP_RANK");
                options.with_host_id(node.unwrap_or_else(|_| (2 * rank / self.world).to_string()))
            }
            // Each rank on a machine of its own.
            "flat" => options.with_host_id(rank.to_string()),
            other => return Err(format!("no transport {other}").into()),
        })
    }

    /// Microseconds a call, per repetition.
    fn time(&self, group: &ProcessGroup) -> Result<Vec<f64>> {
        let count = self.bytes / size_of::<f32>();
        if self.shared {
            self.time_on(group, &mut group.alloc(count)?)
        } else {
            self.time_on(group, &mut vec![0.0; count])
        }
    }

    fn time_on(&self, group: &ProcessGroup, buffer: &mut [f32]) -> Result<Vec<f64>> {
        buffer.fill((group.rank() + 1) as f32);
        group.all_reduce(buffer, ReduceOp::Sum)?;
        let sum = (self.world * (self.world + 1) / 2) as f32;
        if buffer.iter().any(|&x| x != sum) {
            return Err("the sum is wrong".into());
        }
        // Zeros stay zeros however often they are summed.
        buffer.fill(0.0);
        let mut times = Vec::with_capacity(self.repetitions);
        for _ in 0..self.repetitions {
            group.barrier()?;
            let start = Instant::now();
            for _ in 0..self.iterations {
                group.all_reduce(black_box(&mut *buffer), ReduceOp::Sum)?;
            }
            times.push(start.elapsed().as_secs_f64() * 1e6 / f64::from(self.iterations));
        }
        Ok(times)
    }
}

fn print(name: &str, world: usize, bytes: usize, mut times: Vec<f64>) {
    times.sort_by(f64::total_cmp);
    println!("{name} {world} {bytes} {:.3} {:.3}", times[0], times[times.len() / 2]);
}

/// Times the copies of two ranks, by the faster way.
fn least(bytes: usize, iterations: u32, repetitions: usize) {
    let time = |_| {
        let ways = [Exchange::Whole, Exchange::Halves].into_iter();
        let seconds = ways.map(|way| way.time(bytes / size_of::<f32>(), iterations).as_secs_f64());
        1e6 * seconds.fold(f64::INFINITY, f64::min)
    };
    print("least", 2, bytes, (0..repetitions.max(1)).map(time).collect());
}

/// Another rank's process, killed when this is dropped.
struct Rank(Child);

impl Drop for Rank {
    fn drop(&mut self) {
        // Both fail only if it has ended already.
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// Nanoseconds that a word takes from one core to another: two threads pass it to and fro.
///
/// Under a hypervisor the two cores may share a cache one moment and not the next, which changes
/// every figure; so each program's figures go with what this says before and after it.
fn probe() -> f64 {
    let word = AtomicU32::new(0);
    // Relaxed: only the word itself is passed.
    let pass = |turn: u32| {
        while word.load(Ordering::Relaxed) != turn {
            spin_loop();
        }
        word.store(turn + 1, Ordering::Relaxed);
    };
    std::thread::scope(|scope| {
        scope.spawn(|| (0..PINGS).for_each(|i| pass(2 * i + 1)));
        let mut best = f64::INFINITY;
        // The best of several stretches: what else runs here is not the question.
        for stretch in 0..20 {
            let start = Instant::now();
            (stretch * PINGS / 20..(stretch + 1) * PINGS / 20).for_each(|i| pass(2 * i));
            best = best.min(start.elapsed().as_secs_f64() * 1e9 / f64::from(2 * PINGS / 20));
        }
        best
    })
}

/// A column of the table: the best time of a program, or its ratio to the fastest of some peers.
enum Column {
    Time(&'static str, &'static str),
    Ratio(&'static str, &'static [&'static str], &'static str),
}

/// The peers over shared memory.
const SHARED_MEMORY: &[&str] = &["openmpi4-sm", "openmpi5-sm", "intel", "mpich"];
/// The peers over TCP.
const TCP: &[&str] = &["openmpi5-tcp", "gloo"];

/// The columns, of which the table shows those it has figures for.
const COLUMNS: [Column; 15] = [
    Column::Time("shm", "ours"),
    Column::Time("shm-small", "ours, small stages"),
    Column::Time("shm-shared", "ours, shared"),
    Column::Time("openmpi4-sm", "Open MPI 4"),
    Column::Time("openmpi5-sm", "Open MPI 5"),
    Column::Time("intel", "Intel MPI"),
    Column::Time("mpich", "MPICH"),
    Column::Ratio("shm", SHARED_MEMORY, "ours / best peer"),
    Column::Ratio("shm-shared", SHARED_MEMORY, "shared / best peer"),
    Column::Ratio("least", SHARED_MEMORY, "copies alone / best peer"),
    Column::Time("tcp", "ours, tcp"),
    Column::Time("machines", "ours, two machines"),
    Column::Time("openmpi5-tcp", "Open MPI 5 tcp"),
    Column::Time("gloo", "torch gloo"),
    Column::Ratio("tcp", TCP, "tcp / best peer"),
];

/// Best microseconds by program and size.
type Best<'a> = BTreeMap<(&'a str, usize), f64>;

/// The best of all runs, a table for each world size and state of the cores. Runs during which the
/// state changed count for neither.
fn table(lines: &str) -> Result<String> {
    let mut tables: BTreeMap<(usize, &str), Best<'_>> = BTreeMap::new();
    for line in lines.lines() {
        let Run { state: Some(state), name, world, bytes, best } = Run::parse(line)? else {
            continue;
        };
        let times = tables.entry((world, state)).or_default();
        let time = times.entry((name, bytes)).or_insert(f64::INFINITY);
        *time = time.min(best);
    }
    let mut text = String::new();
    for ((world, state), best) in tables {
        text += &format!("\n{world} ranks, cores {state}; best, in µs\n\n");
        text += &rows(&best);
    }
    Ok(text)
}

/// A line of figures.
struct Run<'a> {
    /// Of the cores, if it was the same before and after.
    state: Option<&'static str>,
    name: &'a str,
    world: usize,
    bytes: usize,
    /// Microseconds.
    best: f64,
}

impl<'a> Run<'a> {
    fn parse(line: &'a str) -> Result<Self> {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let &[before, after, name, world, bytes, best, _median] = fields.as_slice() else {
            return Err(format!("not a line of figures: {line}").into());
        };
        let near = |probe| parse(probe).map(|ns: f64| ns < NEAR_NS);
        let state = match (near(before)?, near(after)?) {
            (true, true) => Some("near"),
            (false, false) => Some("far"),
            _ => None,
        };
        Ok(Self { state, name, world: parse(world)?, bytes: parse(bytes)?, best: parse(best)? })
    }
}

/// The ratios of two programs that ran one right after the other, many times: what changes slowly
/// is in both, and the median does not see what hits one.
fn pairs(lines: &str) -> Result<String> {
    let runs: Vec<Run<'_>> = lines.lines().map(Run::parse).collect::<Result<_>>()?;
    let mut ratios: BTreeMap<_, Vec<f64>> = BTreeMap::new();
    for pair in runs.chunks(2) {
        let [one, two] = pair else { return Err("a run without a second one".into()) };
        // Whichever ran first.
        let (over, under) = if one.name < two.name { (one, two) } else { (two, one) };
        if (over.world, over.bytes) != (under.world, under.bytes) || over.name == under.name {
            return Err(format!("{} and {} are no pair", over.name, under.name).into());
        }
        if let (Some(state), true) = (over.state, over.state == under.state) {
            let key = (over.world, state, over.bytes, over.name, under.name);
            ratios.entry(key).or_default().push(over.best / under.best);
        }
    }
    let mut text = String::new();
    let mut table = None;
    for ((world, state, bytes, over, under), mut ratios) in ratios {
        if table.replace((world, state)) != Some((world, state)) {
            text += &format!("\n{world} ranks, cores {state}\n\n");
            text += &format!("| size | {over} / {under}, median | half of them | pairs |\n");
            text += "|---|---|---|---|\n";
        }
        ratios.sort_by(f64::total_cmp);
        let quantile = |quarters: usize| ratios[(ratios.len() - 1) * quarters / 4];
        let (low, middle, high) = (quantile(1), quantile(2), quantile(3));
        let (size, count) = (size(bytes), ratios.len());
        text += &format!("| {size} | {middle:.3} | {low:.3} to {high:.3} | {count} |\n");
    }
    Ok(text)
}

fn rows(best: &Best<'_>) -> String {
    let sizes: BTreeSet<usize> = best.keys().map(|&(_, bytes)| bytes).collect();
    let cell = |column: &Column, bytes: usize| {
        let time = |name: &'static str| best.get(&(name, bytes)).copied();
        match column {
            Column::Time(name, _) => time(name),
            Column::Ratio(ours, peers, _) => {
                Some(time(ours)? / peers.iter().filter_map(|peer| time(peer)).reduce(f64::min)?)
            }
        }
    };
    let shown = |column: &&Column| sizes.iter().any(|&bytes| cell(column, bytes).is_some());
    let columns: Vec<&Column> = COLUMNS.iter().filter(shown).collect();
    let mut text = String::from("| size |");
    for column in &columns {
        let (Column::Time(_, title) | Column::Ratio(_, _, title)) = column;
        text += &format!(" {title} |");
    }
    text += &format!("\n|{}\n", "---|".repeat(columns.len() + 1));
    for bytes in sizes {
        text += &format!("| {} |", size(bytes));
        for column in &columns {
            let value = cell(column, bytes).map_or_else(|| "-".into(), three_digits);
            text += &format!(" {value} |");
        }
        text += "\n";
    }
    text
}

/// For example `64 KiB`.
fn size(bytes: usize) -> String {
    match bytes {
        0..1024 => format!("{bytes} B"),
        1024..1_048_576 => format!("{} KiB", bytes >> 10),
        _ => format!("{} MiB", bytes >> 20),
    }
}

/// Rounds to three significant digits.
fn three_digits(value: f64) -> String {
    let digits = 2 - value.abs().log10().floor() as i32;
    let unit = 10_f64.powi(-digits);
    let places = usize::try_from(digits).unwrap_or(0);
    format!("{:.places$}", (value / unit).round() * unit)
}

fn parse<T: FromStr<Err: Error + 'static>>(text: &str) -> Result<T> {
    text.parse().map_err(|error| format!("{text}: {error}").into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_the_best_of_each_state() {
        let lines = "40 41 shm 2 4 0.5 1\n40 41 shm 2 4 0.25 1\n40 41 openmpi4-sm 2 4 0.5 1\n40 41 intel 2 4 0.4 1\n\
                     200 41 shm 2 4 0.1 1\n200 201 shm 2 65536 12.3456 1\n";
        let text = table(lines).unwrap();
        let near = "| 4 B | 0.250 | 0.500 | 0.400 | 0.625 |\n";
        assert!(text.contains("2 ranks, cores near") && text.contains(near), "{text}");
        let far = "| size | ours |\n|---|---|\n| 64 KiB | 12.3 |\n";
        assert!(text.contains("2 ranks, cores far") && text.contains(far), "{text}");
    }

    #[test]
    fn a_line_that_is_none_is_refused() {
        assert!(table("mpirun: not found\n").is_err());
        assert!(table("1 1 shm 2 four 1 1\n").is_err());
    }

    #[test]
    fn a_pair_is_two_runs_of_one_state() {
        let pair = |a: f64, b: f64| format!("40 41 b 2 4 {b} 1\n40 41 a 2 4 {a} 1\n");
        let odd = "200 41 a 2 4 9 1\n40 41 b 2 4 1 1\n40 41 a 2 4 9 1\n200 201 b 2 4 1 1\n";
        let all = [(1.0, 1.0), (3.0, 2.0), (9.0, 1.0)].map(|(a, b)| pair(a, b)).concat();
        let text = pairs(&format!("{all}{odd}")).unwrap();
        let table = "2 ranks, cores near\n\n| size | a / b, median | half of them | pairs |";
        assert!(text.contains(table), "{text}");
        assert!(text.contains("| 4 B | 1.500 | 1.000 to 1.500 | 3 |"), "{text}");
        assert!(pairs("40 41 a 2 4 1 1\n40 41 b 2 8 1 1\n").is_err());
        assert!(pairs("40 41 a 2 4 1 1\n").is_err());
    }

    #[test]
    fn rounds_to_three_digits() {
        let rounded = [0.012_345, 1.0, 9.999, 84_215.0].map(three_digits);
        assert_eq!(rounded, ["0.0123", "1.00", "10.00", "84200"]);
    }
}
