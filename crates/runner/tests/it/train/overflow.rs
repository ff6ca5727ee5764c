//! Non-finite batches, whose step the loss scale skips, must not affect other state.

use parking_lot::Mutex;
use safetensors::SafeTensors;

use super::midway::{MIDWAY, assert_same_state};
use super::*;

/// Makes one pixel infinite in a rank's batch of iteration `iter`.
fn infinite(iter: usize) -> Box<dyn Hook> {
    struct Infinite(usize);
    impl Hook for Infinite {
        fn name(&self) -> &'static str {
            "Infinite"
        }

        fn before_train_iter(&mut self, runner: &mut Runner, batch: &mut Batch) -> Result<()> {
            if runner.position().iter != self.0 {
                return Ok(());
            }
            let inputs = batch.get("inputs")?;
            let ArrayData::U8(pixels) = inputs.data() else { panic!("not bytes") };
            let mut pixels: Vec<f32> = pixels.iter().map(|p| f32::from(*p) / 255.0).collect();
            pixels[5] = f32::INFINITY;
            let inputs = Array::new(inputs.shape(), ArrayData::F32(pixels))?;
            *batch = std::mem::take(batch).with("inputs", inputs);
            Ok(())
        }
    }
    Box::new(Infinite(iter))
}

/// Batch statistics and their EMA, in mixed precision.
pub(super) fn norm(accumulative_counts: usize) -> String {
    let config = MIDWAY.replace("accumulative_counts = 2", "accumulative_counts = COUNTS");
    let config = config.replace("COUNTS", &accumulative_counts.to_string());
    format!("{VALIDATION}{}", config.replace("width = 8", "width = 4"))
}

pub(super) fn buffers(runner: &mut Runner) -> Result<Vec<Vec<f32>>> {
    let mut all = Vec::new();
    runner.engine_mut().with_buffers(&mut |buffers| {
        for buffer in buffers {
            let fused_optim::SliceMut::F32(values) = buffer else { panic!("not f32") };
            all.push(values.to_vec());
        }
        Ok(())
    })?;
    Ok(all)
}

/// Panics unless all numbers in all files of a checkpoint are finite.
fn assert_finite(checkpoint: &Path) {
    let files = walk(checkpoint).into_iter().filter(|f| f.extension().unwrap() == "safetensors");
    for file in files {
        let bytes = std::fs::read(&file).unwrap();
        for (name, view) in SafeTensors::deserialize(&bytes).unwrap().iter() {
            let finite = match view.dtype() {
                safetensors::Dtype::F32 => {
                    let all = view.data().as_chunks().0.iter();
                    all.map(|b| f32::from_le_bytes(*b)).all(f32::is_finite)
                }
                _ => true,
            };
            assert!(finite, "{}: `{name}` is not finite", file.display());
        }
    }
}

#[test]
fn skipped_step_leaves_buffers_unchanged() {
    let dir = tempfile::tempdir().unwrap();
    let before = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
    let outcome = run(&norm(1), dir.path(), 2, |builder, rank| {
        let [kept, compared] = [(); 2].map(|()| Arc::clone(&before[rank]));
        let builder = if rank == 1 { builder.hook(infinite(4)) } else { builder };
        builder.hook(Box::new(BeforeIter(Box::new(move |runner| {
            match runner.position().iter {
                4 => *kept.lock() = buffers(runner)?,
                5 => {
                    assert!((runner.optim_wrapper().loss_scale() - 128.0).abs() < 0.5);
                    assert_eq!(buffers(runner)?, *compared.lock(), "rank {rank}");
                }
                _ => {}
            }
            Ok(())
        }))))
    });
    assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
    let saved = checkpoints(dir.path());
    assert!(saved.contains(&"iter_24".to_owned()) && saved.len() == 3, "{saved:?}");
    saved.iter().for_each(|name| assert_finite(&dir.path().join(name)));
}

#[test]
fn overflow_in_an_accumulated_batch_leaves_buffers_finite() {
    let dir = tempfile::tempdir().unwrap();
    let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
    // The first of a step's two batches. A checkpoint is saved between them, and the run resumes
    // from it.
    let go_on = |dir: &Path, stop: usize| {
        run(&norm(2), dir, 2, |builder, rank| {
            let builder = if rank == 1 { builder.hook(infinite(4)) } else { builder };
            let stop = before_iter(stop, |_| Err(Error::data("killed")));
            builder.resume(true).hook(stop)
        })
    };
    assert!(go_on(&whole, usize::MAX).iter().all(Result::is_ok));
    assert!(go_on(&broken, 7).iter().all(Result::is_err));
    assert_eq!(checkpoints(&broken), ["iter_5"], "{}", log(&broken));
    let parts = ["model", "ema", "rank_0", "rank_1"];
    let finite = |part: &str| {
        let bytes = std::fs::read(broken.join(format!("iter_5/{part}.safetensors"))).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        tensors.iter().all(|(_, view)| {
            view.data().as_chunks().0.iter().all(|b| f32::from_le_bytes(*b).is_finite())
        })
    };
    assert_eq!(parts.map(finite), [true; 4]);
    assert!(go_on(&broken, usize::MAX).iter().all(Result::is_ok));
    assert_finite(&whole.join("iter_24"));
    assert_same_state(&whole, &broken, "iter_24");
}

#[test]
fn non_finite_buffers_are_not_saved() {
    let dir = tempfile::tempdir().unwrap();
    let config = norm(1).replace("AmpOptimWrapper", "OptimWrapper");
    let config = config.replace("dtype = \"float16\"\n", "");
    let config = config.replace("loss_scale = { init_scale = 256.0, growth_interval = 5 }\n", "");
    let outcome = run(&config, dir.path(), 2, |builder, rank| {
        builder.hook(before_iter(7, move |runner| {
            Ok(runner.engine_mut().with_buffers(&mut |buffers| {
                if let (1, fused_optim::SliceMut::F32(values)) = (rank, &mut buffers[0]) {
                    values.fill(f32::NAN);
                }
                Ok(())
            })?)
        }))
    });
    let says = "`bn1.running_mean` is not finite at the end, iteration 24, at the latest since iteration 10";
    for error in outcome {
        assert!(error.unwrap_err().to_string().contains(says));
    }
    let (saved, log) = (checkpoints(dir.path()), log(dir.path()));
    assert_eq!(saved, ["iter_5"], "{log}");
    let says = "iter_10 is not saved: `bn1.running_mean` of rank 1 is not finite";
    assert!(log.contains(says), "{log}");
    // By then it has been averaged over the ranks.
    assert!(log.contains("iter_15 is not saved: `bn1.running_mean` is not finite"), "{log}");
}

#[test]
fn one_overflow_with_power_sgd_skips_one_step() {
    for wrapper in ["MMDistributedDataParallel", "MMSeparateDistributedDataParallel"] {
        let dir = tempfile::tempdir().unwrap();
        let (whole, broken) = (dir.path().join("whole"), dir.path().join("broken"));
        let config = format!(
            "default_hooks.checkpoint = {{ by_epoch = false, interval = 5 }}\n{}\n\
             [model_wrapper_cfg]\ntype = '{wrapper}'\nbucket_cap_mb = 0.0005\n\
             comm_hook = {{ matrix_approximation_rank = 1, start_powerSGD_iter = 2 }}\n",
            MLP.replace("growth_interval = 5", "growth_interval = 1000")
        );
        let go_on = |dir: &Path, stop: usize| {
            run(&config, dir, 2, |builder, rank| {
                let builder = if rank == 1 { builder.hook(infinite(9)) } else { builder };
                let builder = builder.hook(before_iter(stop, |_| Err(Error::data("killed"))));
                builder.resume(true).hook(before_iter(23, |runner| {
                    let scale = runner.optim_wrapper().loss_scale();
                    assert!((scale - 128.0).abs() < 0.5, "the scale is {scale}");
                    Ok(())
                }))
            })
        };
        let outcome = go_on(&whole, usize::MAX);
        assert!(outcome.iter().all(Result::is_ok), "{outcome:?}");
        assert_eq!(checkpoints(&whole), ["iter_10", "iter_15", "iter_20", "iter_24", "iter_5"]);
        ["iter_10", "iter_24"].iter().for_each(|name| assert_finite(&whole.join(name)));
        assert!(go_on(&broken, 12).iter().all(Result::is_err));
        assert!(go_on(&broken, usize::MAX).iter().all(Result::is_ok));
        assert_equal(&whole, &broken, "iter_24");
    }
}
