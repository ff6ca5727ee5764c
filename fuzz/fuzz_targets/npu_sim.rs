#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| npu_sim::sequence::run(data));
