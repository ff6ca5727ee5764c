//! probe
use collective::sim::{Algorithm, Network, simulate};
use collective::{DType, Determinism, OpDesc, ReduceOp, Verb};
fn main() {
    for algorithm in Algorithm::ALL {
        for count in [1usize, 1 << 24] {
            let op = OpDesc {
                verb: Verb::AllReduce,
                dtype: DType::F32,
                op: Some(ReduceOp::Sum),
                root: None,
                count,
            };
            for world in [8, 64, 512, 1000, 4096] {
                let start = std::time::Instant::now();
                match simulate(&Network::default(), world, &op, Determinism::Fast, Some(algorithm))
                {
                    Ok(r) => println!(
                        "{algorithm} {count} {world}: {:?} expected {:?} ({:.4}) messages {} wall {:?}",
                        r.time,
                        r.expected,
                        r.time.as_secs_f64() / r.expected.as_secs_f64(),
                        r.messages,
                        start.elapsed()
                    ),
                    Err(e) => println!("{e}"),
                }
            }
        }
    }
}
