//! Batches that are not finite, whose step the loss scale skips: what else they could spoil.

use safetensors::SafeTensors;

use super::*;

/// Makes one pixel of a rank's batch `iter` infinite.
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

/// Panics unless all numbers of all files of a checkpoint are finite.
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
fn one_overflow_under_power_sgd_costs_one_step() {
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
                let builder =
                    builder.hook(before_iter(stop, |_| Err(Error::Data("killed".into()))));
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
