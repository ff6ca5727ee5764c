//! Random programs on the safe layer, and the rules that only they would break by chance.

use npu_sim::sequence;

use super::*;

/// Bytes without a pattern, the same for the same seed.
fn noise(seed: u64, count: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 32) as u8
    };
    (0..count).map(|_| next()).collect()
}

#[test]
fn random_programs_break_no_rule_and_read_what_they_wrote() {
    for seed in 0..200 {
        sequence::run(&noise(seed, 241));
    }
}

#[test]
fn the_shortest_programs_work() {
    for bytes in [&[][..], &[1], &[0, 0, 0, 0, 9], &[1, 0, 0, 0, 9, 5, 0, 0, 9, 5, 0, 1, 9]] {
        sequence::run(bytes);
    }
}

#[test]
fn what_is_written_beyond_pinned_memory_is_found() {
    let sim = session();
    on_device(0);
    let mut address = ptr::null_mut();
    // SAFETY: writes to a local.
    unsafe { acl().aclrtMallocHost(&raw mut address, 8) }.unwrap();
    // SAFETY: one byte too far, which is the mistake; the margin is the simulator's.
    unsafe { address.cast::<u8>().add(8).write(0) };
    // SAFETY: of above.
    assert_eq!(code(unsafe { acl().aclrtFreeHost(address) }), 107_000);
    one_violation(&sim, "margin");
    assert_eq!(sim.finish(), [""; 0]);
}
