//! Forward and backward of a training step as one launch: captured as a CUDA graph, then launched for each batch
//! of the same shapes.
//!
//! A graph goes on with the addresses and numbers of its capture. So a captured step reads its batch and the loss
//! scale from tensors that stay where they are, into which each is copied before the launch, and writes losses
//! and gradients to such tensors; what it allocates between is the graph's own. Weights, buffers and these are the
//! only memory that outlives it. The sequence, for each set of shapes: a few steps as always; one that runs on the
//! fixed tensors while candle keeps what it sends (shapes, strides, small constants) and is then captured, which
//! runs nothing; one, of another batch, that runs both ways, to be compared bit for bit, running statistics too;
//! from then on launches. Whatever fails on the way is the reason why steps go on as they are written.
//!
//! What a capture would freeze without a word is looked for: random masks (`dropout.rs` counts what is drawn),
//! numbers copied to the host (candle refuses), labels and indices (`fields.rs` has them looked at before each
//! launch), tensors that outlive the step (allocations are counted). What a model computes on the host from
//! something that is neither in the batch nor in its weights shows in the comparison, if it changes by then.
//!
//! Gradients are reported after the launch, in the order that backward had. Whoever keeps one until the next
//! launch is left with a copy.

#![expect(unsafe_code, reason = "has cudarc track no events, and lists a graph's nodes")]

use std::any::Any;
use std::fmt;
use std::mem::{Discriminant, discriminant};
use std::sync::{Arc, Weak};
use std::thread::{self, ThreadId};

use candle_core::backend::BackendStorage;
use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, DriverError, sys};
use candle_core::{CpuStorage, CudaDevice, CudaStorage, Device, InplaceOp1, Layout, Tensor, bail};
use fused_optim::Slice;
use parking_lot::Mutex;

use super::on_device::{OnDevice, place_of};
use super::ops::dropout;
use super::ops::fields::Asked;
use super::params::Tensors;
use super::{CandleEngine, model};
use crate::data::{ArrayData, Batch};
use crate::engine::{CompileReport, DeviceTensor, GradSink, HostTensor, Losses, SharedSink};
use crate::{Error, Result};

/// How often a set of shapes comes before a step of it is captured.
const EAGER: usize = 2;
/// How many graphs an engine has at most: each has gradients of its own.
const MAX_GRAPHS: usize = 8;
/// How many sets of shapes are told apart.
const MAX_SHAPES: usize = 64;

/// What there is of graphs, by the shapes of the batch.
#[derive(Debug)]
pub(super) struct Graphs {
    fullgraph: bool,
    shapes: Vec<(Shapes, Stage)>,
    refused: Option<String>,
    /// What has changed since somebody asked.
    news: Option<String>,
}

/// Names, extents and types of a batch's fields.
type Shapes = Vec<(String, Vec<usize>, Discriminant<ArrayData>)>;

/// How far a set of shapes has come.
#[derive(Debug)]
enum Stage {
    /// So many steps as they are written.
    Eager(usize),
    /// Captured from this batch, and not compared yet.
    Captured(Box<Step>, Batch),
    InForce(Box<Step>),
}

/// Why there is no graph, and never will be.
type Refusal = String;

impl Graphs {
    pub(super) fn new(device: &CudaDevice, fullgraph: bool) -> Self {
        // SAFETY: what is asked for is order between streams. Of this context there is one: candle's, in which
        // everything is allocated, used and freed; the optimizer works in it, and averages are ordered behind it
        // and before it by events of the reducer's own. Whoever makes another one in a model orders it so, too.
        unsafe { device.disable_event_tracking() };
        Self { fullgraph, shapes: Vec::new(), refused: None, news: None }
    }

    /// Forgets what was captured: the next steps are other ones.
    pub(super) fn forget(&mut self) {
        self.shapes.clear();
    }

    pub(super) fn take_news(&mut self) -> Option<String> {
        self.news.take()
    }

    /// The number of this set of shapes, unless it is to run as it is written.
    fn find(&mut self, batch: &Batch) -> Option<usize> {
        let is = |shapes: &Shapes| {
            let same =
                |((name, array), (n, shape, kind)): ((&str, _), &(String, Vec<usize>, _))| {
                    let array: &crate::data::Array = array;
                    name == n && array.shape() == shape && discriminant(array.data()) == *kind
                };
            batch.iter().count() == shapes.len() && batch.iter().zip(shapes).all(same)
        };
        if self.refused.is_some() {
            return None;
        }
        if let Some(at) = self.shapes.iter().position(|(shapes, _)| is(shapes)) {
            return Some(at);
        }
        let shapes = batch.iter().map(|(name, array)| {
            (name.to_owned(), array.shape().to_vec(), discriminant(array.data()))
        });
        (self.shapes.len() < MAX_SHAPES).then(|| {
            self.shapes.push((shapes.collect(), Stage::Eager(0)));
            self.shapes.len() - 1
        })
    }

    /// Whether there may be no more of them.
    fn is_full(&self) -> bool {
        let graphs = self.shapes.iter().filter(|(_, stage)| !matches!(stage, Stage::Eager(_)));
        graphs.count() >= MAX_GRAPHS
    }

    /// Ends all attempts.
    fn refuse(&mut self, why: Refusal) -> Result<()> {
        // candle's errors may go on with a backtrace.
        let why = why.lines().next().unwrap_or_default().to_owned();
        if self.fullgraph {
            return Err(Error::Engine(format!(
                "compile: `fullgraph`, and a step is no graph: {why}"
            )));
        }
        self.shapes.clear();
        self.news = Some(format!("compile: {WHAT}: not applied: {why}"));
        self.refused = Some(why);
        Ok(())
    }

    /// What has come of it.
    pub(super) fn report(&self, report: &mut CompileReport) {
        let in_force: Vec<String> = self.shapes.iter().filter_map(told).collect();
        if !in_force.is_empty() {
            report.applied.push(format!(
                "{WHAT}, for batches of {}; the optimizer's launches follow it; other shapes, the first steps of \
                 each, more than {MAX_GRAPHS} sets of them and validation run as they are written",
                in_force.join(" and of ")
            ));
        } else if let Some(why) = &self.refused {
            report.not_applied.push(format!("{WHAT}: {why}"));
        } else {
            report.not_applied.push(format!(
                "{WHAT}: not yet: of each set of shapes the step after the first {EAGER} is captured, and the next \
                 one compared with what it is without"
            ));
        }
    }
}

const WHAT: &str = "forward and backward of a step as one launch";

/// The shapes of a step that is launched.
fn told((shapes, stage): &(Shapes, Stage)) -> Option<String> {
    let Stage::InForce(step) = stage else { return None };
    let shapes = shapes.iter().map(|(name, shape, _)| format!("`{name}` {shape:?}"));
    let shapes = shapes.collect::<Vec<_>>().join(", ");
    Some(format!("{shapes} ({} nodes)", step.nodes))
}

/// A training step, captured, launched, or as it is written.
pub(super) fn step(
    engine: &CandleEngine,
    graphs: &mut Graphs,
    (batch, scale): (&Batch, f32),
    sink: &SharedSink,
) -> Result<Losses> {
    let Some(at) = graphs.find(batch) else { return engine.step(batch, scale, sink) };
    let is_full = graphs.is_full();
    let stage = std::mem::replace(&mut graphs.shapes[at].1, Stage::Eager(0));
    match stage {
        Stage::InForce(mut step) if step.holds(engine)? => {
            let losses = step.run(batch, scale, sink);
            graphs.shapes[at].1 = Stage::InForce(step);
            losses
        }
        Stage::Captured(step, of) if *batch != of && step.holds(engine)? => {
            let (computed, verdict) = step.compare(engine, batch, scale)?;
            match verdict {
                Ok(()) => {
                    graphs.shapes[at].1 = Stage::InForce(step);
                    let shapes = told(&graphs.shapes[at]).unwrap_or_default();
                    graphs.news =
                        Some(format!("compile: {WHAT}: applied, for batches of {shapes}"));
                }
                Err(why) => graphs.refuse(why)?,
            }
            computed.report(sink)
        }
        Stage::Eager(seen) if seen >= EAGER && engine.checked && !is_full => {
            let (computed, captured) = capture(engine, batch, scale)?;
            match captured {
                Ok(step) => graphs.shapes[at].1 = Stage::Captured(Box::new(step), batch.clone()),
                Err(why) => graphs.refuse(why)?,
            }
            computed.report(sink)
        }
        // Of a batch like the one captured a comparison would say nothing.
        Stage::Captured(step, of) if *batch == of => {
            graphs.shapes[at].1 = Stage::Captured(step, of);
            engine.step(batch, scale, sink)
        }
        Stage::Eager(seen) => {
            graphs.shapes[at].1 = Stage::Eager(seen + 1);
            engine.step(batch, scale, sink)
        }
        // A weight has moved, or the thread is another one: what candle keeps is a thread's.
        Stage::InForce(_) | Stage::Captured(..) => engine.step(batch, scale, sink),
    }
}

/// What a step computes.
struct Computed {
    names: Vec<String>,
    /// The loss and the other numbers for the log, `f64`.
    scalars: Tensor,
    /// By parameter, in order of backward.
    grads: Vec<(usize, Tensor)>,
}

impl Computed {
    fn losses(&self) -> Result<Losses> {
        losses(&self.names, &self.scalars)
    }

    fn report(self, sink: &SharedSink) -> Result<Losses> {
        let losses = self.losses()?;
        for (index, grad) in self.grads {
            sink.lock().ready_on_device(index, Box::new(OnDevice::new(grad)))?;
        }
        Ok(losses)
    }
}

fn losses(names: &[String], scalars: &Tensor) -> Result<Losses> {
    let values = scalars.to_vec1::<f64>().map_err(|e| failed("reading the losses", &e))?;
    Ok(Losses { scalars: names.iter().cloned().zip(values).collect() })
}

/// Gradients, until backward has ended.
#[derive(Default)]
struct Gathered(Vec<(usize, Tensor)>);

impl GradSink for Gathered {
    fn ready(&mut self, _: usize, _: Slice<'_>) -> Result<()> {
        Err(Error::Engine("a gradient of a step on a GPU is on the host".to_owned()))
    }

    fn ready_on_device(&mut self, index: usize, grad: Box<dyn DeviceTensor>) -> Result<()> {
        let grad: Box<dyn Any> = grad;
        match grad.downcast::<OnDevice>() {
            Ok(grad) => self.0.push((index, grad.tensor())),
            Err(_) => return Err(Error::Engine("a gradient that is of another engine".to_owned())),
        }
        Ok(())
    }
}

/// Forward and backward on fixed tensors. `batch` is what they hold.
fn compute(
    engine: &CandleEngine,
    inputs: &Inputs,
    batch: &Batch,
    is_capture: bool,
) -> Result<(Computed, Vec<Asked>)> {
    let (loss, asked) = engine.loss_of(&inputs.fields, batch, is_capture)?;
    let (names, scalars) = loss.pack()?;
    let scaled = loss.value().broadcast_mul(&inputs.scale).map_err(|e| failed("loss scale", &e))?;
    let gathered = Arc::new(Mutex::new(Gathered::default()));
    let sink: SharedSink = gathered.clone();
    engine.slot.with(&sink, || scaled.backward())?;
    let grads = std::mem::take(&mut gathered.lock().0);
    Ok((Computed { names, scalars, grads }, asked))
}

/// Where a captured step reads.
#[derive(Debug)]
struct Inputs {
    fields: Vec<(String, Tensor)>,
    scale: Tensor,
}

impl Inputs {
    fn new(batch: &Batch, scale: f32, device: &Device) -> Result<Self> {
        let scale = Tensor::new(scale, device).map_err(|e| failed("loss scale", &e))?;
        Ok(Self { fields: model::send(batch, device)?, scale })
    }

    fn fill(&self, batch: &Batch, scale: f32) -> Result<()> {
        let filled =
            self.fields.iter().zip(batch.iter()).try_for_each(|((_, tensor), (_, array))| {
                tensor.inplace_op1(&Upload(array.data()))
            });
        filled
            .and_then(|()| self.scale.inplace_op1(&Upload(&ArrayData::F32(vec![scale]))))
            .map_err(|e| failed("batch", &e))
    }
}

/// Copies numbers of the host's into a tensor that stays where it is.
struct Upload<'a>(&'a ArrayData);

impl InplaceOp1 for Upload<'_> {
    fn name(&self) -> &'static str {
        "upload"
    }

    fn cpu_fwd(&self, _: &mut CpuStorage, _: &Layout) -> candle_core::Result<()> {
        bail!("an upload to the host")
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, _: &Layout) -> candle_core::Result<()> {
        let device = storage.device().clone();
        match self.0 {
            ArrayData::F32(v) => device.memcpy_htod(v, storage.as_cuda_slice_mut::<f32>()?),
            ArrayData::U8(v) => device.memcpy_htod(v, storage.as_cuda_slice_mut::<u8>()?),
            ArrayData::I64(v) => device.memcpy_htod(v, storage.as_cuda_slice_mut::<i64>()?),
        }
    }
}

/// Where a captured step writes.
#[derive(Debug)]
struct Outputs {
    names: Vec<String>,
    scalars: Tensor,
    grads: Vec<(usize, Tensor)>,
    /// Gradients that were handed out.
    lent: Vec<(usize, Weak<Mutex<Tensor>>)>,
}

impl Outputs {
    fn like(computed: &Computed) -> candle_core::Result<Self> {
        let own = |(index, grad): &(usize, Tensor)| Ok((*index, grad.zeros_like()?));
        let outputs = Self {
            names: computed.names.clone(),
            scalars: computed.scalars.zeros_like()?,
            grads: computed.grads.iter().map(own).collect::<candle_core::Result<_>>()?,
            lent: Vec::new(),
        };
        outputs.take(computed)?;
        Ok(outputs)
    }

    /// Copies what was computed.
    fn take(&self, computed: &Computed) -> candle_core::Result<()> {
        let order = |grads: &[(usize, Tensor)]| grads.iter().map(|(i, _)| *i).collect::<Vec<_>>();
        if order(&self.grads) != order(&computed.grads) || self.names != computed.names {
            bail!("the step computes something else each time");
        }
        set(&self.scalars, &computed.scalars)?;
        let pairs = self.grads.iter().zip(&computed.grads);
        pairs.into_iter().try_for_each(|((_, to), (_, from))| set(to, from))
    }

    /// Gradients that are kept until now keep their numbers: what comes overwrites the others.
    fn part(&mut self) -> candle_core::Result<()> {
        for (at, lent) in self.lent.drain(..) {
            let Some(kept) = lent.upgrade() else { continue };
            let mut kept = kept.lock();
            // Unless it has become a sum, which has memory of its own.
            if kept.id() == self.grads[at].1.id() {
                *kept = kept.copy()?;
            }
        }
        Ok(())
    }

    fn report(&mut self, sink: &SharedSink) -> Result<()> {
        for (at, (index, grad)) in self.grads.iter().enumerate() {
            let grad = OnDevice::new(grad.clone());
            self.lent.push((at, grad.downgrade()));
            sink.lock().ready_on_device(*index, Box::new(grad))?;
        }
        Ok(())
    }
}

/// A captured step.
#[derive(Debug)]
struct Step {
    graph: Graph,
    nodes: usize,
    inputs: Inputs,
    outputs: Outputs,
    /// What operators ask of a batch before a launch.
    asked: Vec<Asked>,
    /// Where weights and buffers were.
    places: Vec<u64>,
    thread: ThreadId,
}

impl Step {
    /// Whether all is where it was.
    fn holds(&self, engine: &CandleEngine) -> Result<bool> {
        Ok(self.thread == thread::current().id() && self.places == places(engine)?)
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        let numbers = model::numbers(batch);
        let looked = self.asked.iter().try_for_each(|asked| asked.check(&numbers));
        looked.map_err(|e| failed("forward", &e))
    }

    /// Launches it for a batch.
    fn run(&mut self, batch: &Batch, scale: f32, sink: &SharedSink) -> Result<Losses> {
        self.check(batch)?;
        self.outputs.part().map_err(|e| failed("keeping gradients", &e))?;
        self.inputs.fill(batch, scale)?;
        self.graph.0.launch().map_err(|e| failed("launching a step", &e))?;
        let losses = losses(&self.outputs.names, &self.outputs.scalars)?;
        self.outputs.report(sink)?;
        Ok(losses)
    }

    /// Runs a batch as it is written, which is what counts, then launches it, from the same buffers.
    fn compare(
        &self,
        engine: &CandleEngine,
        batch: &Batch,
        scale: f32,
    ) -> Result<(Computed, std::result::Result<(), Refusal>)> {
        self.inputs.fill(batch, scale)?;
        let before = copies(&engine.buffers)?;
        let (computed, _) = compute(engine, &self.inputs, batch, false)?;
        let after = copies(&engine.buffers)?;
        set_all(&engine.buffers, &before)?;
        let verdict = match self.graph.0.launch() {
            Ok(()) => self.difference(engine, &computed, &after)?,
            Err(e) => Some(format!("launching it: {e}")),
        };
        set_all(&engine.buffers, &after)?;
        Ok((computed, verdict.map_or(Ok(()), Err)))
    }

    /// What the launch has otherwise.
    fn difference(
        &self,
        engine: &CandleEngine,
        computed: &Computed,
        buffers: &[Tensor],
    ) -> Result<Option<Refusal>> {
        let bits = |scalars: &Tensor| {
            let values = scalars.to_vec1::<f64>().map_err(|e| failed("reading the losses", &e))?;
            Ok::<_, Error>(values.into_iter().map(f64::to_bits).collect::<Vec<_>>())
        };
        let differs = |what: &str| {
            Some(format!(
                "{what} would be another one on the next batch: something that changes from step to step is \
                 computed on the host, or operators add up in no fixed order"
            ))
        };
        if bits(&self.outputs.scalars)? != bits(&computed.scalars)? {
            return Ok(differs("the loss, or a number beside it,"));
        }
        for ((index, own), (_, grad)) in self.outputs.grads.iter().zip(&computed.grads) {
            if !same_bits(own, grad)? {
                let name = &engine.params.specs[*index].name;
                return Ok(differs(&format!("the gradient of `{name}`")));
            }
        }
        let own = engine.buffers.tensors.iter().zip(&engine.buffers.specs);
        for ((own, spec), after) in own.zip(buffers) {
            if !same_bits(own, after)? {
                return Ok(differs(&format!("the buffer `{}`", spec.name)));
            }
        }
        Ok(None)
    }
}

/// A graph that one thread at a time uses, which is all that the driver asks.
struct Graph(CudaGraph);

// SAFETY: the driver has graphs used by any thread, as long as no two do at once (CUDA Driver API, "Graph object
// thread safety"): this is reached through `&mut CandleEngine` alone, and dropped once.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Graph").finish()
    }
}

/// Runs a batch on fixed tensors, which is what counts, then captures that.
fn capture(
    engine: &CandleEngine,
    batch: &Batch,
    scale: f32,
) -> Result<(Computed, std::result::Result<Step, Refusal>)> {
    let device = engine.device.as_cuda_device().map_err(|e| failed("capture", &e))?;
    let inputs = Inputs::new(batch, scale, &engine.device)?;
    let drawn = dropout::now().position();
    // From here to the end of the capture candle keeps what it sends.
    let _kept = device.enable_cuda_graph_htod_cache();
    let (computed, _) = compute(engine, &inputs, batch, false)?;
    if dropout::now().position() != drawn {
        return Ok((computed, Err(DRAWS.to_owned())));
    }
    let outputs = match Outputs::like(&computed) {
        Ok(outputs) => outputs,
        Err(e) => return Ok((computed, Err(e.to_string()))),
    };
    let random = dropout::now();
    let recorded = Recording::of(&device.cuda_stream(), || {
        let (computed, asked) = compute(engine, &inputs, batch, true)?;
        outputs.take(&computed).map_err(|e| failed("keeping results", &e))?;
        Ok(asked)
    });
    let has_drawn = dropout::now().position() != random.position();
    dropout::go_back(random);
    let (graph, asked) = match recorded {
        Ok(_) if has_drawn => return Ok((computed, Err(DRAWS.to_owned()))),
        Ok(recorded) => recorded,
        Err(why) => return Ok((computed, Err(why))),
    };
    let Nodes { all, allocations, frees } = nodes(&graph).map_err(|e| failed("capture", &e))?;
    if allocations != frees {
        return Err(Error::Engine(format!(
            "compile: {} tensors that a step has made outlive it: they have no memory outside of the graph; leave \
             mode `reduce-overhead` or `max-autotune`, or backend `cudagraphs`, out",
            allocations.saturating_sub(frees)
        )));
    }
    let (places, thread) = (places(engine)?, thread::current().id());
    let step = Step { graph: Graph(graph), nodes: all, inputs, outputs, asked, places, thread };
    Ok((computed, Ok(step)))
}

const DRAWS: &str = "dropout draws its masks on the host, another one for each step";

/// A capture that is ended however the call ends.
struct Recording<'a>(Option<&'a Arc<CudaStream>>);

impl<'a> Recording<'a> {
    /// Captures what `call` puts into the stream, and all it has made is dropped in it.
    fn of<R>(
        stream: &'a Arc<CudaStream>,
        call: impl FnOnce() -> Result<R>,
    ) -> std::result::Result<(CudaGraph, R), Refusal> {
        let told = |e: DriverError| e.to_string();
        // Other threads go on as they do: only this one uses the stream.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(told)?;
        let mut recording = Self(Some(stream));
        let called = call();
        let ended = recording.end();
        let called = called.map_err(|e| e.to_string())?;
        let graph = ended.map_err(told)?;
        graph.map(|graph| (graph, called)).ok_or_else(|| "nothing was captured".to_owned())
    }

    fn end(&mut self) -> std::result::Result<Option<CudaGraph>, DriverError> {
        let Some(stream) = self.0.take() else { return Ok(None) };
        // Errors of drops: of tensors that a capture which failed cannot free any more.
        let dropped = stream.context().check_err();
        let ended = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        let also = stream.context().check_err();
        dropped.and(also).and(ended)
    }
}

impl Drop for Recording<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// How many nodes a graph has.
struct Nodes {
    all: usize,
    allocations: usize,
    frees: usize,
}

fn nodes(graph: &CudaGraph) -> std::result::Result<Nodes, DriverError> {
    let mut all = 0;
    // SAFETY: a graph that is whole; without a place for nodes it is only asked how many there are.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut all) }
        .result()?;
    let mut nodes = vec![std::ptr::null_mut(); all];
    // SAFETY: as above, with a place for that many.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &raw mut all) }.result()?;
    let mut found = Nodes { all, allocations: 0, frees: 0 };
    for node in nodes {
        // A number: a newer driver may have types that are not among the variants.
        let mut kind = 0_u32;
        // SAFETY: one of the graph's nodes, and a place for its type, of 32 bits.
        unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) }.result()?;
        found.allocations += usize::from(kind == MEM_ALLOC);
        found.frees += usize::from(kind == MEM_FREE);
    }
    Ok(found)
}

// `CUgraphNodeType`, cuda.h of CUDA 11.4 and later.
const MEM_ALLOC: u32 = 10;
const MEM_FREE: u32 = 11;

/// Where weights and buffers are.
fn places(engine: &CandleEngine) -> Result<Vec<u64>> {
    let all = engine.params.tensors.iter().chain(&engine.buffers.tensors);
    all.map(place_of).collect()
}

fn copies(tensors: &Tensors) -> Result<Vec<Tensor>> {
    let copy = |tensor: &Tensor| tensor.detach().copy();
    let copies = tensors.tensors.iter().map(copy).collect::<candle_core::Result<_>>();
    copies.map_err(|e| failed("copying buffers", &e))
}

fn set_all(tensors: &Tensors, values: &[Tensor]) -> Result<()> {
    let set = tensors.tensors.iter().zip(values).try_for_each(|(to, from)| set(to, from));
    set.map_err(|e| failed("copying buffers", &e))
}

/// Copies the elements, as lines: what a scalar has no dimension for.
fn set(to: &Tensor, from: &Tensor) -> candle_core::Result<()> {
    if to.elem_count() == 0 {
        return Ok(());
    }
    to.detach().flatten_all()?.slice_set(&from.contiguous()?.flatten_all()?, 0, 0)
}

fn same_bits(a: &Tensor, b: &Tensor) -> Result<bool> {
    let host = |tensor: &Tensor| OnDevice::new(tensor.detach()).to_host();
    Ok(match (host(a)?, host(b)?) {
        (HostTensor::F32(a), HostTensor::F32(b)) => {
            a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()))
        }
        (HostTensor::F16(a), HostTensor::F16(b)) => {
            a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()))
        }
        (HostTensor::Bf16(a), HostTensor::Bf16(b)) => {
            a.iter().map(|v| v.to_bits()).eq(b.iter().map(|v| v.to_bits()))
        }
        _ => false,
    })
}

fn failed(during: &str, error: &dyn std::error::Error) -> Error {
    Error::Engine(format!("{during}: {error}"))
}
