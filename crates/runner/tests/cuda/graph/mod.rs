//! Steps of `device = "cuda"` as CUDA graphs, compared with eager steps: equal bits. Needs a GPU,
//! or the fake one of `.ci/devices`.

mod runs;
mod whole;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{Module, ModuleT, Tensor};
use candle_nn::VarBuilder;
use fused_optim::{Slice, SliceMut};
use parking_lot::Mutex;
use runner::Result;
use runner::data::{Array, ArrayData, Batch};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, nn, ops,
};
use runner::engine::{
    CompileBackend, CompileMode, CompileOptions, ComputeDevice, DeviceTensor, Engine, EngineState,
    GradSink, Model, SharedSink, StepContext,
};

use crate::gpu;
use crate::step::train_step;

/// Number of eager steps before a capture.
const EAGER: usize = 2;

fn engine<M: CandleModel + 'static>(
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
) -> CandleEngine {
    let options = CandleOptions { device: ComputeDevice::Cuda(0), seed: 5, ..Default::default() };
    CandleEngine::new(options, build).unwrap()
}

fn compiled(mut engine: CandleEngine, fullgraph: bool) -> CandleEngine {
    let options = CompileOptions {
        backend: CompileBackend::Cudagraphs,
        fullgraph,
        ..CompileOptions::default()
    };
    engine.compile(&options).unwrap();
    engine
}

/// Returns eight images of 8 x 8 pixels with labels of three classes, which depend on `seed`.
fn batch(seed: usize) -> Batch {
    let pixels = (0..8 * 64).map(|i| ((i * 37 + seed * 101) % 256) as f32 / 256.0).collect();
    let labels = (0..8).map(|i| ((i + seed) % 3) as i64).collect();
    Batch::new()
        .with("inputs", Array::new([8, 1, 8, 8], ArrayData::F32(pixels)).unwrap())
        .with("labels", Array::new([8], ArrayData::I64(labels)).unwrap())
}

/// Result of a step: losses and gradients, in order, as bits.
type Came = (Vec<(String, u64)>, Vec<(usize, Vec<u32>)>);

#[derive(Default)]
struct Keep(Vec<(usize, Vec<f32>)>);

impl GradSink for Keep {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> train_step::Result<()> {
        let Slice::F32(grad) = grad else { panic!("of another type") };
        self.0.push((index, grad.to_vec()));
        Ok(())
    }
}

/// Takes a step of plain SGD.
fn step(engine: &mut CandleEngine, batch: &Batch, scale: f32) -> Result<Came> {
    Ok(step_from(engine, &mut EngineState::default(), batch, scale)?.0)
}

/// Takes a step of plain SGD; also returns its message for the log.
fn step_from(
    engine: &mut CandleEngine,
    state: &mut EngineState,
    batch: &Batch,
    loss_scale: f32,
) -> Result<(Came, Option<String>)> {
    let keep = Arc::new(Mutex::new(Keep::default()));
    let mut cx = StepContext { loss_scale, ..StepContext::new(keep.clone(), state) };
    let losses = engine.train_step(batch, &mut cx)?;
    let note = cx.note;
    let grads = std::mem::take(&mut keep.lock().0);
    engine.with_params(&mut |params| {
        for (index, grad) in &grads {
            let SliceMut::F32(param) = &mut params[*index] else { panic!("of another type") };
            param.iter_mut().zip(grad).for_each(|(w, g)| *w -= 0.01 / loss_scale * g);
        }
        Ok(())
    })?;
    let bits =
        |(index, grad): (usize, Vec<f32>)| (index, grad.into_iter().map(f32::to_bits).collect());
    let scalars = losses.scalars()?.iter().map(|(name, value)| (name.clone(), value.to_bits()));
    Ok(((scalars.collect(), grads.into_iter().map(bits).collect()), note))
}

fn buffers(engine: &mut CandleEngine) -> Vec<Vec<u32>> {
    let mut bits = Vec::new();
    let mut read = |slices: &mut [SliceMut<'_>]| {
        for slice in slices {
            let SliceMut::F32(values) = slice else { panic!("of another type") };
            bits.push(values.iter().map(|v| v.to_bits()).collect());
        }
        Ok(())
    };
    engine.with_buffers(&mut read).unwrap();
    bits
}

/// A model with a function as loss.
struct Of<F>(nn::Linear, F);

impl<F: Fn(&Tensor, &TensorBatch) -> candle_core::Result<Tensor> + Send> CandleModel for Of<F> {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let x = self.0.forward(&batch.get("inputs")?.flatten_from(1)?)?;
        let loss = (self.1)(&x, batch)?;
        Ok(Loss::new(loss.clone()).with("twice", (loss * 2.0)?))
    }

    fn predict(&self, _: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

fn of<F>(loss: F) -> impl FnOnce(VarBuilder<'static>) -> candle_core::Result<Of<F>>
where
    F: Fn(&Tensor, &TensorBatch) -> candle_core::Result<Tensor> + Send,
{
    move |vb| Ok(Of(nn::linear(64, 3, vb.pp("fc"))?, loss))
}

fn plain(x: &Tensor, batch: &TensorBatch) -> candle_core::Result<Tensor> {
    ops::cross_entropy(x, batch.get("labels")?)
}

/// A network of stock layers.
struct Stock(candle_nn::Conv2d, candle_nn::BatchNorm, candle_nn::Linear);

impl Stock {
    fn new(vb: VarBuilder<'_>) -> candle_core::Result<Self> {
        let padded = candle_nn::Conv2dConfig { padding: 1, ..Default::default() };
        Ok(Self(
            candle_nn::conv2d(1, 4, 3, padded, vb.pp("conv"))?,
            candle_nn::batch_norm(4, 1e-5, vb.pp("norm"))?,
            candle_nn::linear(4 * 64, 3, vb.pp("fc"))?,
        ))
    }
}

impl CandleModel for Stock {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let x = self.1.forward_t(&self.0.forward(batch.get("inputs")?)?, true)?.relu()?;
        let x = self.2.forward(&x.flatten_from(1)?)?;
        Ok(Loss::new(candle_nn::loss::cross_entropy(&x, batch.get("labels")?)?))
    }

    fn predict(&self, _: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

fn report(engine: &CandleEngine) -> String {
    engine.compile_report().unwrap().to_string()
}

const APPLIED: &str = "compile: applied: forward and backward as one CUDA graph";

#[test]
fn stock_layers_and_their_buffers_have_the_same_bits() {
    let _gpu = gpu::alone();
    let mut eager = engine(Stock::new);
    let mut graph = compiled(engine(Stock::new), true);
    for seed in 0..8 {
        // Each step has another loss scale.
        let (batch, scale) = (batch(seed), 2_f32.powi(seed as i32));
        let wanted = step(&mut eager, &batch, scale).unwrap();
        let mut state = EngineState::default();
        let (came, note) = step_from(&mut graph, &mut state, &batch, scale).unwrap();
        assert_eq!(came, wanted, "{seed}");
        assert_eq!(buffers(&mut graph), buffers(&mut eager), "{seed}");
        let in_force = seed > EAGER;
        assert_eq!(report(&graph).starts_with(APPLIED), in_force, "{seed}: {}", report(&graph));
        assert_eq!(report(&graph).contains("not yet: for each set of shapes"), !in_force);
        assert_eq!(note.is_some(), seed == EAGER + 1, "{seed}");
    }
}

#[test]
fn large_index_tables_are_sent_before_the_capture() {
    let _gpu = gpu::alone();
    let tables = |x: &Tensor, batch: &TensorBatch| {
        // Windows of an image of 40 x 40 pixels; causal attention over 80 positions.
        let images = batch.get("inputs")?.reshape((8, 1, 8, 8))?.broadcast_mul(&x.mean_all()?)?;
        let images = Tensor::cat(&[&images; 5], 2)?;
        let images = Tensor::cat(&[&images; 5], 3)?;
        let pooled = ops::max_pool2d(&images, 3, ops::Window { stride: 2, padding: 1 })?;
        let options = ops::AttentionOptions { heads: 2, causal: true };
        let packed = images.reshape((8, 80, 20))?.narrow(2, 0, 12)?.contiguous()?;
        let seen = ops::self_attention(&packed, options)?;
        plain(x, batch)? + (pooled.mean_all()? + seen.sqr()?.mean_all()?)?
    };
    let (mut eager, mut graph) = (engine(of(tables)), compiled(engine(of(tables)), true));
    for seed in 0..6 {
        let wanted = step(&mut eager, &batch(seed), 1.0).unwrap();
        assert_eq!(step(&mut graph, &batch(seed), 1.0).unwrap(), wanted, "{seed}");
    }
    assert!(report(&graph).starts_with(APPLIED), "{}", report(&graph));
}

/// Number of operations and of graphs that this thread launched on GPUs, if the GPU is the fake
/// one.
#[expect(unsafe_code, reason = "the fake GPU is a library of C")]
fn launched() -> Option<[u64; 2]> {
    // SAFETY: looks up a symbol by name in the loaded libraries.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, c"fake_gpu_launched".as_ptr()) };
    if address.is_null() {
        return None;
    }
    // SAFETY: the function of this name has no arguments and returns the address of two words of
    // this thread.
    let launched = unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *const [u64; 2]>(address)
    };
    // SAFETY: as above.
    Some(unsafe { *launched() })
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn step_is_one_graph_launch() {
    let _gpu = gpu::alone();
    let mut graph = compiled(engine(Stock::new), true);
    let sink: SharedSink = Arc::new(Mutex::new(Keep::default()));
    for seed in 0..8 {
        let before = launched().unwrap();
        train_step(&mut graph, None, &batch(seed), 1.0, &sink).unwrap();
        let [single, graphs] = launched().unwrap();
        let (single, graphs) = (single - before[0], graphs - before[1]);
        match seed {
            0..=EAGER => assert!(single > 50 && graphs == 0, "{seed}: {single}"),
            3 => assert!(single > 50 && graphs == 1, "{seed}: {single}"),
            _ => assert_eq!([single, graphs], [0, 1], "{seed}"),
        }
    }
}

#[test]
fn engine_moved_to_another_thread_captures_again() {
    let _gpu = gpu::alone();
    let mut eager = engine(Stock::new);
    let mut graph = compiled(engine(Stock::new), true);
    for thread in 0..2 {
        let same = |seed| {
            let wanted = step(&mut eager, &batch(seed), 1.0).unwrap();
            assert_eq!(step(&mut graph, &batch(seed), 1.0).unwrap(), wanted, "{seed}");
            report(&graph).starts_with(APPLIED)
        };
        // The first step on a thread finds the graph captured on another one.
        let seeds = 6 * thread..6 * thread + 6;
        let applied: Vec<bool> = std::thread::scope(|scope| {
            scope.spawn(move || seeds.map(same).collect()).join().unwrap()
        });
        assert!(!applied[0] && applied[5], "{applied:?}");
    }
}

/// Stores gradients on their device.
#[derive(Default)]
struct Hold(Vec<Box<dyn DeviceTensor>>);

impl GradSink for Hold {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> train_step::Result<()> {
        panic!("a gradient is on the host");
    }

    fn ready_on_device(&mut self, _: usize, grad: Box<dyn DeviceTensor>) -> train_step::Result<()> {
        self.0.push(grad);
        Ok(())
    }
}

#[test]
fn stored_gradients_are_not_overwritten() {
    let _gpu = gpu::alone();
    let hold = |mut engine: CandleEngine| {
        let held = Arc::new(Mutex::new(Hold::default()));
        let sink: SharedSink = held.clone();
        for seed in 0..8 {
            train_step(&mut engine, None, &batch(seed), 1.0, &sink).unwrap();
        }
        let held = std::mem::take(&mut held.lock().0);
        held.iter().map(|grad| grad.to_host().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(hold(compiled(engine(of(plain)), true)), hold(engine(of(plain))));
}

#[test]
fn invalid_label_is_the_eager_error_before_the_launch() {
    let _gpu = gpu::alone();
    // The second half of labels, and the first of indices transposed: both as views.
    let views = |x: &Tensor, batch: &TensorBatch| {
        let labels = batch.get("labels")?;
        let indices = labels.narrow(0, 0, 4)?.reshape((2, 2))?.t()?;
        let chosen = ops::embedding(&indices, x)?.flatten_to(1)?;
        ops::cross_entropy(&chosen, &labels.narrow(0, 4, 4)?)
    };
    let mut eager = engine(of(views));
    let mut graph = compiled(engine(of(views)), true);
    for seed in 0..6 {
        let wanted = step(&mut eager, &batch(seed), 1.0).unwrap();
        assert_eq!(step(&mut graph, &batch(seed), 1.0).unwrap(), wanted, "{seed}");
    }
    for (labels, wanted) in [
        ([0, 1, 8, 1, 0, 1, 2, 0], "forward: embedding: index 8 is none of 8 rows"),
        ([7, 1, 1, 1, 0, 1, 3, 0], "forward: cross_entropy: label 3 is none of 3 classes"),
        ([7, 1, 1, 1, 0, -1, 1, 0], "forward: cross_entropy: label -1 is none of 3 classes"),
    ] {
        let bad =
            batch(1).with("labels", Array::new([8], ArrayData::I64(labels.to_vec())).unwrap());
        let before = launched();
        let error = step(&mut graph, &bad, 1.0).unwrap_err().to_string();
        assert!(error.contains(wanted), "{error}");
        assert_eq!(launched(), before);
        let eagerly = step(&mut eager, &bad, 1.0).unwrap_err().to_string();
        // With RUST_BACKTRACE candle's errors end with a backtrace.
        assert_eq!(eagerly.lines().next(), error.lines().next());
    }
    let good = Array::new([8], ArrayData::I64(vec![7, 1, 1, 3, 0, 2, 1, 0])).unwrap();
    let good = batch(1).with("labels", good);
    assert_eq!(step(&mut graph, &good, 1.0).unwrap(), step(&mut eager, &good, 1.0).unwrap());
}

/// Counter of `refused`.
static STEP: AtomicUsize = AtomicUsize::new(0);

/// Runs both, and returns the reason why there is no graph, which is an error with `fullgraph`.
fn refused<F>(loss: impl Fn() -> F) -> String
where
    F: Fn(&Tensor, &TensorBatch) -> candle_core::Result<Tensor> + Send + 'static,
{
    let mut eager = engine(of(loss()));
    let mut graph = compiled(engine(of(loss())), false);
    let mut notes = Vec::new();
    let mut states = [EngineState::default(), EngineState::default()];
    for seed in 0..7 {
        STEP.store(seed, Ordering::Relaxed);
        let wanted = step_from(&mut eager, &mut states[0], &batch(seed), 1.0).unwrap().0;
        let (came, note) = step_from(&mut graph, &mut states[1], &batch(seed), 1.0).unwrap();
        assert_eq!(came, wanted, "{seed}");
        notes.extend(note);
    }
    assert_eq!(states[0], states[1]);
    let report = report(&graph);
    assert!(!report.contains("applied: forward"), "{report}");
    let (_, why) = report.split_once("as one CUDA graph: ").unwrap();
    assert!(notes.last().unwrap().ends_with(why), "{report}");
    let mut full = compiled(engine(of(loss())), true);
    let failed = (0..4).find_map(|seed| {
        STEP.store(seed, Ordering::Relaxed);
        step(&mut full, &batch(seed), 1.0).err()
    });
    let failed = failed.unwrap().to_string();
    assert!(
        failed.contains("`fullgraph` is set, but a step cannot be captured: ")
            && failed.ends_with(why),
        "{failed}"
    );
    why.to_owned()
}

#[test]
fn values_frozen_by_a_capture_are_detected_and_steps_stay_eager() {
    let _gpu = gpu::alone();
    let why = refused(|| {
        |x: &Tensor, batch: &TensorBatch| {
            let noise = ops::rand(0.0, 0.1, x.shape(), x.dtype(), x.device())?;
            plain(&(x + noise)?, batch)
        }
    });
    assert!(why.starts_with("random numbers are drawn on the host in each step"), "{why}");
    let why = refused(|| {
        |x: &Tensor, batch: &TensorBatch| {
            let largest = x.detach().abs()?.max_all()?.to_scalar::<f32>()?;
            plain(&(x / f64::from(largest))?, batch)
        }
    });
    assert!(why.contains("to_cpu_storage during CUDA graph capture"), "{why}");
    let why = refused(|| {
        |x: &Tensor, batch: &TensorBatch| ops::cross_entropy(x, &(batch.get("labels")? * 1.0)?)
    });
    assert!(why.contains("the labels of cross_entropy are checked on the host"), "{why}");
    // A value computed on the host: it changes in each step, or only in the compared step.
    for first in [0, EAGER] {
        let why = refused(|| {
            move |x: &Tensor, batch: &TensorBatch| {
                let factor = STEP.load(Ordering::Relaxed).saturating_sub(first) as f32;
                plain(&x.broadcast_mul(&Tensor::new(1.0 + factor, x.device())?)?, batch)
            }
        });
        assert!(why.contains("the loss or another scalar of a graph launch differs"), "{why}");
    }
    // Random numbers of the GPU, which are captured.
    let build =
        of(|x: &Tensor, batch: &TensorBatch| plain(&candle_nn::ops::dropout(x, 0.5)?, batch));
    let mut graph = compiled(engine(build), false);
    (0..5).for_each(|seed| drop(step(&mut graph, &batch(seed), 1.0).unwrap()));
    assert!(
        report(&graph).contains("the loss or another scalar of a graph launch differs"),
        "{}",
        report(&graph)
    );
    // Tensors that are freed in the next step, which a capture must not do.
    let why = refused(|| {
        let (last, also) = (Mutex::new(None), Mutex::new(None));
        move |x: &Tensor, batch: &TensorBatch| {
            *last.lock() = Some(x.detach());
            let twice = (x * 2.0)?;
            *also.lock() = Some(twice.detach());
            plain(&twice, batch)
        }
    });
    assert!(why.contains("frees a tensor created in an earlier step"), "{why}");
    // A tensor that differs in each call.
    let calls = Arc::new(AtomicUsize::new(0));
    let mut graph = compiled(
        engine(of({
            let calls = Arc::clone(&calls);
            move |x: &Tensor, batch: &TensorBatch| {
                let factor = calls.fetch_add(1, Ordering::Relaxed) as f32;
                plain(&x.broadcast_mul(&Tensor::new(1.0 + factor, x.device())?)?, batch)
            }
        })),
        false,
    );
    (0..4).for_each(|seed| drop(step(&mut graph, &batch(seed), 1.0).unwrap()));
    assert!(report(&graph).contains("missing cached host data"), "{}", report(&graph));
}

#[test]
fn tensor_that_outlives_a_step_is_an_error_with_advice() {
    let _gpu = gpu::alone();
    let kept = Mutex::new(Vec::new());
    let keep = move |x: &Tensor, batch: &TensorBatch| {
        kept.lock().push((x * 2.0)?.detach());
        plain(x, batch)
    };
    let mut graph = compiled(engine(of(keep)), false);
    (0..EAGER).for_each(|seed| drop(step(&mut graph, &batch(seed), 1.0).unwrap()));
    let error = step(&mut graph, &batch(EAGER), 1.0).unwrap_err().to_string();
    assert!(
        error.contains("1 tensors created in a step outlive it")
            && error.contains("do not use mode `reduce-overhead`"),
        "{error}"
    );
}

#[test]
fn fullgraph_needs_a_mode_with_graphs() {
    let _gpu = gpu::alone();
    let mut engine = engine(of(plain));
    let options = CompileOptions { fullgraph: true, ..CompileOptions::default() };
    let error = engine.compile(&options).unwrap_err().to_string();
    assert!(error.contains("`fullgraph` on cuda:0 needs mode `reduce-overhead`"), "{error}");
    let mode = CompileMode::MaxAutotune;
    engine.compile(&CompileOptions { mode, ..options }).unwrap();
    assert!(report(&engine).contains("as one CUDA graph: not yet"));
}
