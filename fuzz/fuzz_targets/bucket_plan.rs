#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz::bucket_plan::check(data));
