//! Executes every algorithm with a small interpreter and compares the results with the expected
//! ones.

#![expect(unsafe_code, reason = "spans over the buffers of the interpreter")]

use std::collections::{HashMap, VecDeque};

use proptest::prelude::*;

use super::*;
use crate::memory::Span;
use crate::{DType, simd};

const DTYPES: [DType; 5] = [DType::F32, DType::F16, DType::F64, DType::I32, DType::U8];

/// Length of the first part of a message.
const EARLY: usize = 20;

/// One rank's buffers.
struct Rank_ {
    input: Vec<u8>,
    output: Vec<u8>,
    scratch: Vec<u8>,
    /// Number of writes to each byte of the output.
    written: Vec<u32>,
}

fn span(bytes: &mut [u8]) -> Span<'_> {
    // SAFETY: borrowed for as long as the span lives, and used on this thread only.
    unsafe { Span::new(bytes.as_mut_ptr(), bytes.len()) }
}

impl Rank_ {
    fn new(op: &OpDesc, rank: Rank, world: usize, schedule: &Schedule, tame: bool) -> Self {
        let size = op.dtype.size();
        let (input, output) = sizes(op, rank, world);
        let in_place = is_in_place(op.verb);
        let data = numbers(op.dtype, rank, input, tame);
        let output = if in_place { data.clone() } else { vec![0xee; output * size] };
        Self {
            written: vec![0; output.len()],
            input: if in_place { Vec::new() } else { data },
            output,
            scratch: vec![0xee; schedule.scratch],
        }
    }

    fn memory<'a>(&'a mut self, members: &'a [Span<'a>]) -> Memory<'a> {
        Memory {
            input: span(&mut self.input),
            output: span(&mut self.output),
            scratch: span(&mut self.scratch),
            members,
        }
    }

    fn note(&mut self, region: Region) {
        if region.buf == Buf::Output {
            self.written[region.offset..][..region.len].iter_mut().for_each(|n| *n += 1);
        }
    }
}

fn is_in_place(verb: Verb) -> bool {
    matches!(verb, Verb::AllReduce | Verb::Reduce | Verb::Broadcast)
}

/// Number of elements of a rank's input and output.
fn sizes(op: &OpDesc, rank: Rank, world: usize) -> (usize, usize) {
    let root = op.root == Some(rank);
    let all = op.count * world;
    match op.verb {
        Verb::Gather => (op.count, if root { all } else { 0 }),
        Verb::Scatter => (if root { all } else { 0 }, op.count),
        Verb::AllToAll => (all, all),
        _ => (op.input_count(world), op.output_count(world)),
    }
}

/// Returns `count` numbers: any bits or, if `tame`, small numbers whose sums are exact enough to
/// compare.
fn numbers(dtype: DType, rank: Rank, count: usize, tame: bool) -> Vec<u8> {
    let mut state = rank as u64 * 1_000_003 + 17;
    let mut next = move || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ state >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb)
    };
    let number = |bits: u64| {
        if !tame && bits.is_multiple_of(16) || !dtype.is_float() {
            return (bits >> 8).to_le_bytes()[..dtype.size()].to_vec();
        }
        let x = (bits >> 40) as f64 / f64::from(1 << 24) + 0.5;
        match dtype {
            DType::F16 => half::f16::from_f64(x).to_le_bytes().to_vec(),
            DType::F32 => (x as f32).to_le_bytes().to_vec(),
            _ => x.to_le_bytes().to_vec(),
        }
    };
    (0..count).flat_map(|_| number(next())).collect()
}

/// The outputs of each machine's ranks.
fn member_outputs(ranks: &mut [Rank_], layout: &Layout) -> Vec<Vec<Span<'static>>> {
    // SAFETY: the buffers live as long as the interpreter runs, and are used on this thread only.
    let output =
        |rank: &mut Rank_| unsafe { Span::new(rank.output.as_mut_ptr(), rank.output.len()) };
    let outputs: Vec<_> = ranks.iter_mut().map(output).collect();
    let members = |machine| layout.members(machine).iter().map(|&rank| outputs[rank]).collect();
    (0..layout.machines()).map(members).collect()
}

/// Executes the schedules of all ranks, in an order given by `seed`.
fn interpret(
    op: &OpDesc,
    schedules: &[Schedule],
    layout: &Layout,
    seed: u64,
    tame: bool,
) -> Vec<Rank_> {
    let world = schedules.len();
    let mut ranks: Vec<_> =
        (0..world).map(|rank| Rank_::new(op, rank, world, &schedules[rank], tame)).collect();
    let members = member_outputs(&mut ranks, layout);
    let mut wires: HashMap<(Rank, Rank), VecDeque<Vec<u8>>> = HashMap::new();
    // For each rank, the number of rounds begun and done.
    let mut at = vec![(0, 0); world];
    let mut round = Round::default();
    let mut state = seed;
    loop {
        let mut moved = false;
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        for turn in 0..world {
            // Visits every rank once, starting with a different one each time.
            let rank = (turn + (state >> 33) as usize) % world;
            let (begun, done) = at[rank];
            let members = &members[layout.machine(rank)];
            if done == schedules[rank].rounds {
                continue;
            }
            schedules[rank].round(done, &mut round);
            check_round(&round, rank, world);
            if begun == done {
                for (to, region) in blocks(&round.sends) {
                    let memory = ranks[rank].memory(members);
                    let mut bytes = vec![0; region.len];
                    span(&mut bytes).copy_from(memory.region(region));
                    wires.entry((rank, to)).or_default().push_back(bytes);
                }
                at[rank].0 += 1;
                moved = true;
            }
            let mut wanted: HashMap<Rank, usize> = HashMap::new();
            let recvs: Vec<_> = blocks(&round.recvs).collect();
            recvs.iter().for_each(|(from, _)| *wanted.entry(*from).or_default() += 1);
            let here = |from: Rank| wires.get(&(from, rank)).map_or(0, VecDeque::len);
            if wanted.iter().any(|(&from, &count)| here(from) < count) {
                continue;
            }
            for (from, region) in recvs {
                let mut bytes = wires.get_mut(&(from, rank)).unwrap().pop_front().unwrap();
                assert_eq!(bytes.len(), region.len, "{op}: {from} -> {rank}");
                ranks[rank].memory(members).region(region).copy_from(span(&mut bytes));
                ranks[rank].note(region);
            }
            ranks[rank].memory(members).work(op.dtype, &round);
            for local in &round.local {
                let (owner, region) = stored(target(local), rank, layout);
                let is_over = at[owner].1 == schedules[owner].rounds;
                assert!(!is_over, "{op}: {rank} stores into {owner}, which is done");
                ranks[owner].note(region);
            }
            at[rank].1 += 1;
            moved = true;
        }
        if at.iter().zip(schedules).all(|(at, schedule)| at.1 == schedule.rounds) {
            assert!(wires.values().all(VecDeque::is_empty), "{op}: a message was not received");
            return ranks;
        }
        assert!(moved, "{op}: deadlock at {at:?}");
    }
}

/// Cuts every message in two after `EARLY` bytes and orders the parts, like the TCP backend.
fn blocks(messages: &[(Rank, Region)]) -> impl Iterator<Item = (Rank, Region)> {
    let parts = |start: usize, end: usize| {
        messages.iter().map(move |&(peer, Region { buf, offset, len })| {
            let (start, end) = (start.min(len), end.min(len));
            (peer, Region { buf, offset: offset + start, len: end - start })
        })
    };
    parts(0, EARLY).chain(parts(EARLY, usize::MAX)).filter(|(_, part)| part.len > 0)
}

/// Returns the rank that owns the memory of a region of `rank`, and the region on that rank.
fn stored(region: Region, rank: Rank, layout: &Layout) -> (Rank, Region) {
    match region.buf {
        Buf::Member(index) => {
            let member = layout.members(layout.machine(rank))[index];
            (member, Region { buf: Buf::Output, ..region })
        }
        _ => (rank, region),
    }
}

/// The region that a local step writes.
fn target(local: &Local) -> Region {
    match local {
        Local::Copy { to, .. } | Local::Fold { to, .. } => *to,
    }
}

/// Checks the guarantees of [`Round`].
fn check_round(round: &Round, rank: Rank, world: usize) {
    let overlap = |a: &Region, b: &Region| {
        a.buf == b.buf && a.offset < b.offset + b.len && b.offset < a.offset + a.len
    };
    for (i, (peer, into)) in round.recvs.iter().enumerate() {
        assert!(*peer != rank && *peer < world && into.len > 0 && into.buf != Buf::Input);
        assert!(round.sends.iter().all(|(_, from)| !overlap(into, from)), "overlaps a send");
        assert!(round.recvs[..i].iter().all(|(_, other)| !overlap(into, other)), "overlap");
    }
    for (peer, from) in &round.sends {
        assert!(*peer != rank && *peer < world && from.len > 0);
    }
    for local in &round.local {
        let to = target(local);
        assert!(to.buf != Buf::Input && to.len > 0);
    }
}

/// The expected output of each rank; `None` if it is unchanged.
fn expected(op: &OpDesc, world: usize, tame: bool) -> Vec<Option<Vec<u8>>> {
    let size = op.dtype.size();
    let input = |rank| numbers(op.dtype, rank, sizes(op, rank, world).0, tame);
    let inputs: Vec<_> = (0..world).map(input).collect();
    let block = op.count * size;
    let part = |bytes: &[u8], index: usize| bytes[index * block..][..block].to_vec();
    let reduced = || {
        let mut inputs = inputs.clone();
        let mut out = vec![0; inputs[0].len()];
        let sources: Vec<_> = inputs.iter_mut().map(|bytes| span(bytes)).collect();
        simd::fold(op.dtype, op.op.unwrap(), &[span(&mut out)], &sources);
        out
    };
    let root = op.root.unwrap_or(0);
    (0..world)
        .map(|rank| match op.verb {
            Verb::AllReduce => Some(reduced()),
            Verb::Reduce => Some(if rank == root { reduced() } else { inputs[rank].clone() }),
            Verb::Broadcast => Some(inputs[root].clone()),
            Verb::AllGather => Some(inputs.concat()),
            Verb::ReduceScatter => Some(part(&reduced(), rank)),
            Verb::Gather => (rank == root).then(|| inputs.concat()),
            Verb::Scatter => Some(part(&inputs[root], rank)),
            Verb::AllToAll => Some((0..world).flat_map(|from| part(&inputs[from], rank)).collect()),
            verb => unreachable!("{verb}"),
        })
        .collect()
}

fn floats(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    bytes
        .chunks(dtype.size())
        .map(|x| match dtype {
            DType::F16 => half::f16::from_le_bytes(x.try_into().unwrap()).to_f64(),
            DType::F32 => f32::from_le_bytes(x.try_into().unwrap()).into(),
            _ => f64::from_le_bytes(x.try_into().unwrap()),
        })
        .collect()
}

/// Runs one operation with one algorithm and compares the results.
fn check(algorithm: Algorithm, op: &OpDesc, layout: &Layout, costs: &Costs, fast: bool) {
    check_one(algorithm, op, layout, costs, fast, false);
    if algorithm == Algorithm::Hierarchical && op.verb == Verb::AllReduce {
        check_one(algorithm, op, layout, costs, fast, true);
    }
}

/// Same as [`check`], with or without shared buffers.
fn check_one(
    algorithm: Algorithm,
    op: &OpDesc,
    layout: &Layout,
    costs: &Costs,
    fast: bool,
    shared: bool,
) {
    let world = layout.world();
    let schedules: Vec<_> =
        (0..world).map(|rank| schedule(algorithm, op, rank, layout, costs, shared)).collect();
    let exact = !fast;
    let ranks = interpret(op, &schedules, layout, op.count as u64, fast);
    let what = format!("{algorithm:?}: {op} of {layout:?}");
    for (rank, (got, expected)) in ranks.iter().zip(expected(op, world, fast)).enumerate() {
        let Some(expected) = expected else { continue };
        let changed = match op.verb {
            Verb::Reduce | Verb::Broadcast => (rank == op.root.unwrap()) == (op.op.is_some()),
            _ => true,
        };
        if op.op.is_none() {
            let once = u32::from(changed);
            assert!(got.written.iter().all(|&n| n == once), "{what}: rank {rank} writes once");
        } else {
            assert!(got.written.iter().all(|&n| (n > 0) == changed), "{what}: rank {rank}");
        }
        if exact || op.op.is_none() || !op.dtype.is_float() {
            assert_eq!(got.output, expected, "{what}: rank {rank}");
            continue;
        }
        // Each of `world` folds rounds once; values are below `2 * world`.
        let unit = match op.dtype {
            DType::F16 => 1e-3,
            DType::F32 => 1e-7,
            _ => 2e-16,
        };
        for (got, expected) in floats(op.dtype, &got.output).iter().zip(floats(op.dtype, &expected))
        {
            let bound = unit * world as f64 * expected.abs() * 2.0;
            let close = (got - expected).abs() <= bound || *got == expected;
            assert!(close, "{what}: rank {rank}: {got} for {expected}");
        }
        if op.verb == Verb::AllReduce {
            assert_eq!(got.output, ranks[0].output, "{what}: same bits on every rank");
        }
    }
}

const VERBS: [Verb; 8] = [
    Verb::AllReduce,
    Verb::Reduce,
    Verb::Broadcast,
    Verb::AllGather,
    Verb::ReduceScatter,
    Verb::Gather,
    Verb::Scatter,
    Verb::AllToAll,
];

/// Every operator of a verb; one `None` for verbs that only copy.
fn operators(verb: Verb, dtype: DType) -> Vec<Option<ReduceOp>> {
    match verb {
        Verb::AllReduce | Verb::Reduce | Verb::ReduceScatter => {
            ReduceOp::ALL.into_iter().filter(|op| op.supports(dtype)).map(Some).collect()
        }
        _ => vec![None],
    }
}

fn root_of(verb: Verb, root: Rank) -> Option<Rank> {
    matches!(verb, Verb::Reduce | Verb::Broadcast | Verb::Gather | Verb::Scatter).then_some(root)
}

/// Costs for which a chunk is a few elements.
fn tiny_chunks() -> Costs {
    let free = Link { latency: 0.0, per_message: 0.0, per_byte: 1e-9 };
    Costs { within: free, between: free, fold_per_byte: 0.0, min_chunk: 24 }
}

#[test]
fn algorithms_match_the_expected_result() {
    for world in 1..=17 {
        let layout = Layout::blocks(world, 1 + world % 4);
        for (turn, &verb) in VERBS.iter().enumerate() {
            for algorithm in Algorithm::ALL {
                let dtype = DTYPES[(world + turn) % DTYPES.len()];
                for op in operators(verb, dtype) {
                    for count in [1, 7, 33] {
                        let root = root_of(verb, (count + turn) % world);
                        let op = OpDesc { verb, dtype, op, root, count };
                        for (determinism, fast) in
                            [(Determinism::RankOrder, false), (Determinism::Fast, true)]
                        {
                            if layout.able(algorithm, &op, determinism) {
                                check(algorithm, &op, &layout, &tiny_chunks(), fast);
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn empty_operations_have_no_rounds() {
    let layout = Layout::blocks(5, 2);
    for verb in VERBS.into_iter().chain([Verb::Barrier]) {
        let op = operators(verb, DType::F32)[0];
        let op = OpDesc { verb, dtype: DType::F32, op, root: root_of(verb, 1), count: 0 };
        let plan = plan(&op, 1, &layout, Determinism::RankOrder, &Costs::default());
        assert_eq!((plan.rounds, plan.scratch), (0, 0));
    }
}

#[test]
fn scratch_of_folds_is_bounded() {
    let each = |world, count| {
        for verb in [Verb::AllReduce, Verb::Reduce, Verb::ReduceScatter] {
            for per_machine in [1, 2, 8] {
                for (determinism, rank) in [(Determinism::RankOrder, 0), (Determinism::Fast, 1)] {
                    let layout = Layout::blocks(world, per_machine);
                    let (dtype, op, root) = (DType::F32, Some(ReduceOp::Sum), root_of(verb, 0));
                    let op = OpDesc { verb, dtype, op, root, count };
                    let plan = plan(&op, rank, &layout, determinism, &Costs::default());
                    let bytes = op.input_count(world) * 4;
                    let most = if bytes <= 4 << 20 { 3 * bytes } else { 4 << 20 };
                    let what = format!("{op}, {world} ranks, {per_machine} per machine");
                    assert!(plan.scratch <= most, "{what}: {} bytes", plan.scratch);
                }
            }
        }
    };
    for world in [2, 6, 8, 64] {
        [64 << 10, 1 << 20, 4 << 20, 64 << 20].into_iter().for_each(|count| each(world, count));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn any_placement_and_length(
        machines in prop::collection::vec(0_usize..4, 1..14),
        verb in prop::sample::select(&VERBS[..]),
        dtype in prop::sample::select(&DTYPES[..]),
        algorithm in prop::sample::select(&Algorithm::ALL[..]),
        pick in any::<prop::sample::Index>(),
        root in any::<prop::sample::Index>(),
        count in 1_usize..200,
        fast in any::<bool>(),
        latency in prop::sample::select(&[0.0, 1e-9, 1e-6][..]),
        per_message in prop::sample::select(&[0.0, 1e-10, 1e-8, 1e-6][..]),
        min_chunk in prop::sample::select(&[1_usize, 24, 4000][..]),
    ) {
        // The values include those for which the cost model picks each algorithm for the parts of
        // two-level.
        let link = Link { latency, per_message, per_byte: 1e-9 };
        let costs = Costs { within: link, between: link, fold_per_byte: 0.0, min_chunk };
        let layout = Layout::new(&machines);
        let op = operators(verb, dtype);
        let op = op[pick.index(op.len())];
        let root = root_of(verb, root.index(machines.len()));
        let op = OpDesc { verb, dtype, op, root, count };
        let determinism = if fast { Determinism::Fast } else { Determinism::RankOrder };
        prop_assume!(layout.able(algorithm, &op, determinism));
        check(algorithm, &op, &layout, &costs, fast);
    }
}
