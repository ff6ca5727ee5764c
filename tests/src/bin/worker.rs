//! One rank of an integration test: the runner's own command line, plus hooks that do harm on
//! request and hooks that look closely.

use std::io::Write;
use std::path::PathBuf;

use fused_optim::SliceMut;
use runner::data::{Array, ArrayData, Batch};
use runner::engine::Losses;
use runner::hooks::HOOKS;
use runner::hooks::Hook;
use runner::{Result, Runner};

/// Kills this process, the hard way, before rank `rank` trains on iteration `iter`.
struct KillHook {
    rank: usize,
    iter: usize,
}

impl Hook for KillHook {
    fn name(&self) -> &'static str {
        "KillHook"
    }

    fn before_train_iter(&mut self, runner: &mut Runner, _: &mut Batch) -> Result<()> {
        if runner.group().rank() == self.rank && runner.position().iter == self.iter {
            let me = rustix::process::getpid();
            rustix::process::kill_process(me, rustix::process::Signal::KILL)
                .expect("a process may kill itself");
            std::thread::sleep(std::time::Duration::from_secs(60));
        }
        Ok(())
    }
}

/// Puts an infinity into rank `rank`'s batch of iteration `iter`.
struct OverflowHook {
    rank: usize,
    iter: usize,
}

impl Hook for OverflowHook {
    fn name(&self) -> &'static str {
        "OverflowHook"
    }

    fn before_train_iter(&mut self, runner: &mut Runner, batch: &mut Batch) -> Result<()> {
        if runner.group().rank() == self.rank && runner.position().iter == self.iter {
            let shape = batch.get("inputs")?.shape().to_vec();
            let mut values = vec![1.0; shape.iter().product()];
            values[0] = f32::INFINITY;
            let inputs = Array::new(shape, ArrayData::F32(values))?;
            *batch = std::mem::take(batch).with("inputs", inputs);
        }
        Ok(())
    }
}

/// Appends to `rank<r>.trace`, after each iteration, the loss scale and a digest of all parameters.
#[derive(Default)]
struct TraceHook {
    file: Option<std::fs::File>,
}

impl Hook for TraceHook {
    fn name(&self) -> &'static str {
        "TraceHook"
    }

    fn before_train(&mut self, runner: &mut Runner) -> Result<()> {
        let path: PathBuf =
            runner.work_dir().with_extension(format!("rank{}.trace", runner.group().rank()));
        self.file = Some(std::fs::File::create(path).expect("a trace can be created"));
        Ok(())
    }

    fn after_train_iter(&mut self, runner: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let scale = runner.optim_wrapper().loss_scale();
        // FNV-1a over the parameters' bits.
        let mut digest = 0xcbf2_9ce4_8422_2325_u64;
        let mut mix =
            |bits: u32| digest = (digest ^ u64::from(bits)).wrapping_mul(0x0100_0000_01b3);
        runner.engine_mut().with_params(&mut |params| {
            for param in params {
                match param {
                    SliceMut::F32(v) => v.iter().for_each(|x| mix(x.to_bits())),
                    SliceMut::F16(v) => v.iter().for_each(|x| mix(x.to_bits().into())),
                    SliceMut::Bf16(v) => v.iter().for_each(|x| mix(x.to_bits().into())),
                }
            }
            Ok(())
        })?;
        let file = self.file.as_mut().expect("before_train opened it");
        writeln!(file, "{scale} {digest:016x}").expect("a trace can be written");
        Ok(())
    }
}

fn main() -> std::process::ExitCode {
    HOOKS
        .register("KillHook", |s| {
            Ok(Box::new(KillHook { rank: s.required("rank")?, iter: s.required("iter")? }))
        })
        .expect("the name is free");
    HOOKS
        .register("OverflowHook", |s| {
            Ok(Box::new(OverflowHook { rank: s.required("rank")?, iter: s.required("iter")? }))
        })
        .expect("the name is free");
    HOOKS.register("TraceHook", |_| Ok(Box::new(TraceHook::default()))).expect("the name is free");
    runner::zoo::register();
    runner::cli::main()
}
