//! Programs on npu-sys' safe layer, spelled by arbitrary bytes, against the simulator of CANN.
//!
//! Checked: no rule of CANN is broken whatever the order of calls, every byte is what a model in plain
//! memory says, and nothing is left on the device.

#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| npu_sim::sequence::run(data));
