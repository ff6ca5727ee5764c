//! `model_wrapper_cfg` over ranks as threads: broadcast of buffers, a model in parts, compression,
//! unused parameters, a user-defined wrapper.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use collective::ProcessGroup;
use fused_optim::{DType, Slice, SliceMut};
use runner::config::Config;
use runner::data::{Array, Batch};
use runner::engine::{
    Engine, EngineState, Gradient, Losses, Model, SharedSink, StepContext, TensorSpec,
};
use runner::model::MODEL_WRAPPERS;
use runner::model::{DistributedDataParallel, ModelWrapper};
use runner::optim_wrapper::{OPTIM_WRAPPERS, update_params};
use runner::placement::Placement;
use runner::{Error, Result};

/// Four parameters of two elements in two parts, and a buffer; every gradient is the rank plus 1.
struct Parts {
    specs: Vec<TensorSpec>,
    buffer_specs: Vec<TensorSpec>,
    params: Vec<Vec<f32>>,
    buffer: Vec<f32>,
    rank: f32,
    /// Indices of reported gradients, in order.
    order: Vec<usize>,
    /// Values of the buffer in each forward pass.
    seen: Vec<f32>,
}

fn spec(name: &str) -> TensorSpec {
    TensorSpec { name: name.to_owned(), shape: vec![2], dtype: DType::F32 }
}

impl Parts {
    fn new(rank: usize) -> Self {
        Self {
            specs: ["g.a", "g.b", "d.a", "d.b"].map(spec).into(),
            buffer_specs: vec![spec("g.running_mean")],
            params: vec![vec![1.0; 2]; 4],
            buffer: vec![rank as f32 * 10.0; 2],
            rank: rank as f32,
            order: vec![3, 2, 1, 0],
            seen: Vec::new(),
        }
    }
}

impl Model for Parts {
    fn params(&self) -> &[TensorSpec] {
        &self.specs
    }

    fn buffers(&self) -> &[TensorSpec] {
        &self.buffer_specs
    }

    fn with_params(&mut self, visit: &mut train_step::Visit<'_>) -> train_step::Result<()> {
        visit(&mut self.params.iter_mut().map(|p| SliceMut::F32(p)).collect::<Vec<_>>())
    }

    fn with_buffers(&mut self, visit: &mut train_step::Visit<'_>) -> train_step::Result<()> {
        visit(&mut [SliceMut::F32(&mut self.buffer)])
    }
}

impl Engine for Parts {
    fn train_step(&mut self, _: &Batch, cx: &mut StepContext<'_>) -> Result<Losses> {
        self.seen.push(self.buffer[0]);
        let next = self.buffer[0] + self.rank + 1.0;
        self.buffer.fill(next);
        for &index in &self.order {
            cx.sink.lock().ready(index, Slice::F32(&[(self.rank + 1.0) * cx.loss_scale; 2]))?;
        }
        Ok(Losses::default())
    }

    fn eval(&mut self, _: &Batch) -> Result<Vec<(String, Array)>> {
        Ok(Vec::new())
    }
}

/// Runs `steps` iterations on two ranks with this wrapper; SGD with a learning rate of 0.5, a step
/// every `counts` iterations.
fn train(
    wrapper: &str,
    counts: usize,
    steps: usize,
    change: impl Fn(&mut Parts) + Sync,
) -> Vec<Result<Parts>> {
    let groups = ProcessGroup::threads(2, Duration::from_secs(60)).unwrap();
    let rank = |group: ProcessGroup| -> Result<Parts> {
        let mut engine = Parts::new(group.rank());
        change(&mut engine);
        let section = |text: String| Config::from_text("c.toml", text).unwrap().into_section();
        let wrapper = section(wrapper.to_owned());
        let wrapper = MODEL_WRAPPERS.build_or(wrapper, "MMDistributedDataParallel")?;
        let mut model = wrapper(group, engine.params())?;
        let optim = format!(
            "type = 'OptimWrapper'\naccumulative_counts = {counts}\n\
             optimizer = {{ type = 'SGD', lr = 0.5 }}"
        );
        let mut optim =
            (OPTIM_WRAPPERS.build(section(optim))?.build)(engine.params(), &Placement::host())?;
        let mut state = EngineState::default();
        for _ in 0..steps {
            update_params(&mut optim, (&mut engine, &mut *model), &Batch::new(), &mut state)?;
        }
        Ok(engine)
    };
    std::thread::scope(|scope| {
        let rank = &rank;
        let ranks: Vec<_> = groups.into_iter().map(|g| scope.spawn(move || rank(g))).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Expected parameters: the mean of 1 and 2 is 1.5.
fn after(steps: usize) -> Vec<Vec<f32>> {
    vec![vec![1.0 - 0.75 * steps as f32; 2]; 4]
}

#[test]
fn all_options_average_gradients() {
    for wrapper in [
        "",
        "static_graph = true",
        "bucket_cap_mb = 0.000001",
        "comm_hook = 'fp16_compress'",
        "comm_hook = 'bf16_compress'",
        "comm_hook = 'powerSGD'",
        "type = 'MMSeparateDistributedDataParallel'",
        "type = 'MMSeparateDistributedDataParallel'\nbucket_cap_mb = 0.000001",
    ] {
        for engine in train(wrapper, 1, 4, |_| {}) {
            assert_eq!(engine.unwrap().params, after(4), "{wrapper}");
        }
    }
}

/// Each part has its own group, so ranks may differ in which part's gradients come first.
#[test]
fn order_of_parts_may_differ_between_ranks() {
    let wrapper = "type = 'MMSeparateDistributedDataParallel'\nbucket_cap_mb = 0.000001";
    let engines = train(wrapper, 1, 6, |engine| {
        engine.order = if engine.rank == 0.0 { vec![3, 2, 1, 0] } else { vec![1, 0, 3, 2] };
    });
    for engine in engines {
        assert_eq!(engine.unwrap().params, after(6));
    }
}

/// Rank 0's buffers are broadcast before each forward pass that follows one with `sync`, as in
/// PyTorch.
#[test]
fn buffers_are_broadcast_if_enabled() {
    let seen = |wrapper: &str, counts: usize| {
        let engines = train(wrapper, counts, 4, |_| {});
        engines.into_iter().map(|engine| engine.unwrap().seen).collect::<Vec<_>>()
    };
    // Rank 0 adds 1 in each forward pass, rank 1 adds 2 and starts from 10.
    let (zero, own) = ([0.0, 1.0, 2.0, 3.0], [10.0, 12.0, 14.0, 16.0]);
    assert_eq!(seen("", 1), [zero, own]);
    assert_eq!(seen("broadcast_buffers = true", 1), [zero, zero]);
    // With accumulation, every second forward pass follows one without `sync`.
    assert_eq!(seen("broadcast_buffers = true", 2), [zero, [0.0, 2.0, 2.0, 4.0]]);
}

#[test]
fn unused_parameter_is_named_in_the_same_step() {
    let unused = |engine: &mut Parts| {
        if engine.rank == 1.0 {
            engine.order = vec![3, 1, 0];
        }
    };
    for wrapper in ["", "type = 'MMSeparateDistributedDataParallel'"] {
        let mut errors = train(wrapper, 1, 1, unused).into_iter().map(|r| r.err().unwrap());
        let (peer, own) = (errors.next().unwrap().to_string(), errors.next().unwrap());
        assert!(peer.contains("d.a"), "{wrapper}: {peer}");
        let Error::Collective(collective::Error::UnusedParameters { rank: 1, names }) = own else {
            panic!("{wrapper}: {own}");
        };
        assert_eq!(names, ["d.a"]);
    }
    // Its gradient counts as zero if that is allowed: the mean is half of rank 0's 1.
    for wrapper in ["find_unused_parameters = true", "static_graph = true"] {
        for engine in train(wrapper, 1, 3, unused) {
            let mut wanted = after(3);
            wanted[2] = vec![1.0 - 3.0 * 0.5 * 0.5; 2];
            assert_eq!(engine.unwrap().params, wanted, "{wrapper}");
        }
    }
}

/// A user-defined wrapper that counts forward passes and delegates everything else.
struct Counting {
    inner: DistributedDataParallel,
    forwards: Arc<AtomicUsize>,
}

impl ModelWrapper for Counting {
    fn sink(&self) -> SharedSink {
        self.inner.sink()
    }

    fn prepare(
        &mut self,
        engine: Option<&mut dyn Model>,
        cx: &mut StepContext<'_>,
    ) -> train_step::Result<()> {
        // Relaxed: read after the ranks have been joined.
        self.forwards.fetch_add(1, Ordering::Relaxed);
        self.inner.prepare(engine, cx)
    }

    fn finish(&mut self) -> train_step::Result<()> {
        self.inner.finish()
    }

    fn with_grads(
        &self,
        visit: &mut dyn FnMut(&[Option<Gradient<'_>>]) -> train_step::Result<()>,
    ) -> train_step::Result<()> {
        self.inner.with_grads(visit)
    }

    fn zero_grad(&mut self) {
        self.inner.zero_grad();
    }
}

#[test]
fn user_defined_wrapper_can_be_registered() {
    let forwards = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&forwards);
    MODEL_WRAPPERS
        .register("CountingDDP", move |section| {
            let unused = section.or("find_unused_parameters", false)?;
            let forwards = Arc::clone(&counter);
            Ok(Box::new(move |group, params| {
                let mut options = collective::reducer::ReducerOptions::default();
                options.find_unused_parameters = unused;
                let inner = DistributedDataParallel::new(group, params, options)?;
                Ok(Box::new(Counting { inner, forwards }))
            }))
        })
        .unwrap();
    for engine in train("type = 'CountingDDP'\nfind_unused_parameters = true", 1, 3, |_| {}) {
        assert_eq!(engine.unwrap().params, after(3));
    }
    assert_eq!(forwards.load(Ordering::Relaxed), 6);
    let error = train("type = 'CountingDPD'", 1, 1, |_| {}).remove(0).err().unwrap().to_string();
    assert!(error.contains("did you mean `CountingDDP`?"), "{error}");
}
