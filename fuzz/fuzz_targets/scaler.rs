#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::scaler::check(data));
