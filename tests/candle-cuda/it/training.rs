//! The program runs, and what it trains learns.

use std::process::Command;

/// candle's tensors, its gradients, and AdamW with clipping by `fused-optim`'s kernels.
#[test]
fn the_loss_falls() {
    let output = Command::new(env!("CARGO_BIN_EXE_candle-cuda")).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let losses: Vec<f32> =
        text.lines().map(|line| line.split(": ").nth(1).unwrap().parse().unwrap()).collect();
    assert_eq!(losses.len(), 10, "{text}");
    assert!(losses.windows(2).all(|two| two[1] < two[0]), "{losses:?}");
}
