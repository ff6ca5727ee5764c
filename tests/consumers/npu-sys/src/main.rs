//! The first program of `npu-sys`'s README.

fn main() {
    match npu_sys::probe() {
        Ok(found) => println!("{found}"), // 8 x Ascend910B2, AscendCL 1.14.0
        Err(reason) => println!("no NPU: {reason}"),
    }
}
