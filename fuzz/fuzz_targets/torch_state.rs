#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::torch_state::check(data));
