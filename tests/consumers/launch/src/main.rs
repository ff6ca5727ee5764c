//! The first program of `launch`'s README.

use launch::{LaunchOptions, launch};

fn main() -> launch::Result<()> {
    // Two ranks of a program in any language; here the shell's.
    let mut options = LaunchOptions::new(2, ["-c", "echo $RANK of $WORLD_SIZE"]);
    options.program = Some("sh".into());
    options.max_restarts = 3;
    std::process::exit(launch(options)?); // prints `[rank 0] 0 of 2` and `[rank 1] 1 of 2`
}
