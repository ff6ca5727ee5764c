//! A training step as one CUDA graph: captured once, then launched for each batch of the same
//! shapes.
//!
//! A graph keeps the addresses and constants of its capture. So a captured step reads batch and
//! loss scale from tensors with fixed addresses, which are filled before the launch, and writes
//! losses and gradients to such tensors; memory allocated in between belongs to the graph. Weights,
//! buffers and these tensors are the only memory that outlives the graph. For each set of shapes
//! the sequence is: a few eager steps; one step that runs on the fixed tensors, while candle keeps
//! the data it sends (shapes, strides, small constants), and is then captured, which runs nothing;
//! one step, on another batch, that runs both eagerly and as a graph, and compares the results bit
//! for bit, including running statistics; from then on graph launches. After any failure steps stay
//! eager, with the failure as reason in the report.
//!
//! Kernels draw masks of dropout from a position that is one of the fixed tensors. The following
//! would be frozen in a capture without an error, and is detected: random numbers drawn on the host
//! (they are counted), values copied to the host (candle returns an error), labels and indices
//! (checked on the host before each launch, see `candle_ops::known_inputs`), tensors that outlive
//! the step (allocations are counted). Values computed on the host from anything other than batch
//! and weights are detected by the comparison, if they have changed by then.
//!
//! The optimizer step is part of the graph (`optimizer.rs`) if the gradients of one batch go to the
//! optimizer unchanged: not with several ranks, gradient accumulation, or several optimizers. The
//! launch of the comparison skips the optimizer step, as after an overflow. In mixed precision a
//! separate launch before it copies the buffers.
//!
//! Gradients are reported after the launch, in the order of backward. A gradient that is kept until
//! the next launch becomes a copy.

mod optimizer;
mod recording;
mod tensors;

use std::fmt::Display;
use std::mem::{Discriminant, discriminant};
use std::thread::{self, ThreadId};

use candle_core::Tensor;
use candle_ops::context::{random_key, random_position, set_random_position};
use candle_ops::known_inputs::IndexCheck;
use fused_optim::cuda::DeviceSlice;
use fused_optim::{FoundInf, Launches, StepCtl};
use train_data::{Array, ArrayData, Batch};
use train_step::{BoxError, CompileReport, OptimizerStep, StepContext, on_device};

use self::recording::Graph;
pub use self::tensors::{Computed, Gradients, Scalars};
use self::tensors::{Inputs, Outputs, same_bits};
use crate::data::{Fields, numbers};
use crate::tensors::{ModelTensors, Tensors};

/// A model on a GPU whose steps are captured by [`Graphs`]. Its passes run in the stream of its
/// device, with the [`Context`](candle_ops::Context) entered.
pub trait GraphModel {
    /// Error of a step.
    type Error: From<train_step::Error> + Display;
    /// Result of a step.
    type Loss;

    /// Returns an error with this text, and its cause, if there is one.
    fn error(text: String, cause: Option<BoxError>) -> Self::Error;

    /// Returns the model's tensors, which keep their addresses.
    fn tensors(&self) -> &ModelTensors;

    /// Returns the statistics of norm layers, which forward changes in place.
    fn buffers(&self) -> &Tensors {
        &self.tensors().buffers
    }

    /// Identifies the function of the forward pass: a step of another one has a graph of its own.
    fn pass(&self) -> usize {
        0
    }

    /// Returns the copies to the model's device.
    fn inputs(&self) -> &crate::Inputs;

    /// Runs a step eagerly: forward and backward of a batch, and reports the gradients.
    ///
    /// # Errors
    ///
    /// Those of the passes and of the sink.
    fn step(&self, batch: &Batch, cx: &mut StepContext<'_>) -> Result<Self::Loss, Self::Error>;

    /// Runs forward in training mode on these tensors, and backward from a gradient of `scale`, a
    /// scalar of `f32` on the device.
    ///
    /// # Errors
    ///
    /// Those of the passes.
    fn compute(&self, fields: &Fields, scale: &Tensor) -> Result<Computed, Self::Error>;

    /// Returns the result of a step with these scalars, whose memory is used again by the next one.
    ///
    /// # Errors
    ///
    /// Those of a copy.
    fn losses(&self, scalars: &Scalars) -> Result<Self::Loss, Self::Error>;
}

/// Number of eager steps per set of shapes before the capture.
const EAGER: usize = 2;
/// Maximum number of graphs of a model; each has its own gradients.
const MAX_GRAPHS: usize = 8;
/// Maximum number of sets of shapes that are kept.
const MAX_SHAPES: usize = 64;

/// Graphs of a model's steps, by shapes.
#[derive(Debug)]
pub struct Graphs {
    pub(crate) fullgraph: bool,
    shapes: Vec<(Shapes, Phase)>,
    refused: Option<String>,
}

/// Key of a graph.
#[derive(Debug, PartialEq)]
struct Shapes {
    /// Names, shapes and types of a batch's fields.
    fields: Vec<(String, Vec<usize>, Discriminant<ArrayData>)>,
    /// Whether the graph includes an optimizer step.
    is_whole: bool,
    autocast: Option<fused_optim::DType>,
    /// [`GraphModel::pass`].
    pass: usize,
}

impl Shapes {
    fn new(batch: &Batch, cx: &StepContext<'_>, pass: usize) -> Self {
        let field = |(name, array): (&str, &Array)| {
            (name.to_owned(), array.shape().to_vec(), discriminant(array.data()))
        };
        let fields = batch.iter().map(field).collect();
        let is_whole = cx.step.as_ref().is_some_and(|step| step.may_join_backward);
        Self { fields, is_whole, autocast: cx.autocast, pass }
    }
}

/// State of a set of shapes.
#[derive(Debug)]
enum Phase {
    /// Number of eager steps so far.
    Eager(usize),
    /// Captured from this batch, and not yet compared.
    Captured(Box<Step>, Batch),
    InForce(Box<Step>),
}

/// Reason for which graphs are not used.
type Refusal = String;

impl Graphs {
    /// Creates no graphs yet. With `fullgraph` a step that cannot be captured is an error.
    #[must_use]
    pub const fn new(fullgraph: bool) -> Self {
        Self { fullgraph, shapes: Vec::new(), refused: None }
    }

    /// Returns the index of the batch's shapes, or `None` if the step must be eager.
    fn find(&mut self, batch: &Batch, cx: &StepContext<'_>, pass: usize) -> Option<usize> {
        if self.refused.is_some() {
            return None;
        }
        let own = Shapes::new(batch, cx, pass);
        let known = self.shapes.iter().position(|(shapes, _)| *shapes == own);
        known.or_else(|| {
            let has_room = self.shapes.len() < MAX_SHAPES;
            has_room.then(|| self.shapes.push((own, Phase::Eager(0))))?;
            Some(self.shapes.len() - 1)
        })
    }

    /// Returns whether the maximum number of graphs is reached.
    fn is_full(&self) -> bool {
        let graphs = self.shapes.iter().filter(|(_, phase)| !matches!(phase, Phase::Eager(_)));
        graphs.count() >= MAX_GRAPHS
    }

    /// Gives up graphs, and records the reason.
    fn refuse<M: GraphModel>(
        &mut self,
        why: Refusal,
        cx: &mut StepContext<'_>,
    ) -> Result<(), M::Error> {
        // candle's errors may end with a backtrace.
        let why = why.lines().next().unwrap_or_default().to_owned();
        if self.fullgraph {
            let text = format!("compile: `fullgraph` is set, but a step cannot be captured: {why}");
            return Err(M::error(text, None));
        }
        self.shapes.clear();
        cx.note = Some(format!("compile: {WHAT}: not applied: {why}"));
        self.refused = Some(why);
        Ok(())
    }

    /// Runs a training step: captured, as a graph or eager. Records the optimizer's result if the
    /// graph includes its step.
    ///
    /// # Errors
    ///
    /// Those of the passes, of the sink and of the optimizer; with `fullgraph` the reason why a
    /// step cannot be captured; a tensor of a captured step that outlives it.
    pub fn step<M: GraphModel>(
        &mut self,
        model: &M,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<M::Loss, M::Error> {
        let Some(at) = self.find(batch, cx, model.pass()) else { return model.step(batch, cx) };
        let is_full = self.is_full();
        let phase = std::mem::replace(&mut self.shapes[at].1, Phase::Eager(0));
        match phase {
            Phase::InForce(mut step) if step.holds(model, cx)? => {
                let losses = step.run(model, batch, cx);
                self.shapes[at].1 = Phase::InForce(step);
                losses
            }
            Phase::Captured(step, of) if *batch != of && step.holds(model, cx)? => {
                let (computed, compared) = step.compare(model, batch, cx)?;
                match compared {
                    Ok(()) => {
                        let what = if step.launches.is_some() { WHOLE } else { WHAT };
                        let of = describe(&self.shapes[at].0, &step);
                        cx.note = Some(format!("compile: {what}: applied, for batches of {of}"));
                        self.shapes[at].1 = Phase::InForce(step);
                    }
                    Err(why) => self.refuse::<M>(why, cx)?,
                }
                computed.report(model, &cx.sink)
            }
            Phase::Eager(seen) if seen >= EAGER && !is_full => {
                if let Some(why) = obstacle(model) {
                    self.refuse::<M>(why, cx)?;
                    return model.step(batch, cx);
                }
                let (computed, captured) = capture(model, batch, cx)?;
                match captured {
                    Ok(step) => self.shapes[at].1 = Phase::Captured(Box::new(step), batch.clone()),
                    Err(why) => self.refuse::<M>(why, cx)?,
                }
                computed.report(model, &cx.sink)
            }
            // Comparing the captured batch with itself would prove nothing.
            Phase::Captured(step, of) if *batch == of => {
                self.shapes[at].1 = Phase::Captured(step, of);
                model.step(batch, cx)
            }
            Phase::Eager(seen) => {
                self.shapes[at].1 = Phase::Eager(seen + 1);
                model.step(batch, cx)
            }
            // A weight has a new address, the optimizer has other launches, or the thread differs
            // (candle's cache is per thread).
            Phase::InForce(_) | Phase::Captured(..) => model.step(batch, cx),
        }
    }

    /// Adds the graphs in use to the report, or the reason why there are none.
    pub fn report(&self, report: &mut CompileReport) {
        let steps = || self.shapes.iter().filter_map(in_force);
        for (what, is_whole, more) in [
            (WHOLE, true, ""),
            (
                WHAT,
                false,
                "; averaging over ranks, gradient accumulation and steps of several optimizers run after \
                the graph",
            ),
        ] {
            let own = steps().filter(|(_, step)| step.launches.is_some() == is_whole);
            let of: Vec<String> = own.map(|(shapes, step)| describe(shapes, step)).collect();
            if !of.is_empty() {
                report.applied.push(format!(
                    "{what}, for batches of {}{more}; other shapes, the first steps of each set of shapes, \
                     sets beyond {MAX_GRAPHS} graphs, and validation run eagerly",
                    of.join(" and of ")
                ));
            }
        }
        if steps().next().is_some() {
            return;
        }
        if let Some(why) = &self.refused {
            report.not_applied.push(format!("{WHAT}: {why}"));
        } else {
            report.not_applied.push(format!(
                "{WHAT}: not yet: for each set of shapes, the step after the first {EAGER} is captured, and \
                 the next one is compared with its eager run"
            ));
        }
    }
}

const WHAT: &str = "forward and backward as one CUDA graph";
const WHOLE: &str = "forward, backward and optimizer step as one CUDA graph";

/// Returns a graph in use with its shapes.
fn in_force((shapes, phase): &(Shapes, Phase)) -> Option<(&Shapes, &Step)> {
    match phase {
        Phase::InForce(step) => Some((shapes, step)),
        _ => None,
    }
}

fn describe(shapes: &Shapes, step: &Step) -> String {
    let shapes = shapes.fields.iter().map(|(name, shape, _)| format!("`{name}` {shape:?}"));
    let shapes = shapes.collect::<Vec<_>>().join(", ");
    format!("{shapes} ({} nodes)", step.graph.nodes)
}

/// A captured step.
#[derive(Debug)]
struct Step {
    graph: Graph,
    inputs: Inputs,
    outputs: Outputs,
    /// Range checks of labels and indices, repeated for each batch before its launch.
    checks: Vec<IndexCheck>,
    /// Addresses of weights and buffers at the capture.
    addresses: Vec<u64>,
    thread: ThreadId,
    /// Launches of the optimizer step in the graph.
    launches: Option<Launches>,
    /// Number of random words that a step draws, and the key of their stream.
    drawn: u64,
    random_key: [u64; 4],
}

impl Step {
    /// Returns whether all addresses are unchanged; prepares the optimizer step in the graph.
    fn holds<M: GraphModel>(&self, model: &M, cx: &mut StepContext<'_>) -> Result<bool, M::Error> {
        let addresses = addresses(model).map_err(|e| failed::<M>("lending a tensor", e))?;
        let is_same = self.addresses == addresses && self.random_key == random_key();
        if self.thread != thread::current().id() || !is_same {
            return Ok(false);
        }
        match self.optimizer_step(cx) {
            Some(step) => Ok(optimizer::prepare(step, model.tensors(), &self.outputs.own.grads)?
                == self.launches),
            None => Ok(self.launches.is_none()),
        }
    }

    /// Returns the optimizer step, if it is in the graph.
    fn optimizer_step<'c, 'a>(
        &self,
        cx: &'c mut StepContext<'a>,
    ) -> Option<&'c mut OptimizerStep<'a>> {
        cx.step.as_mut().filter(|step| step.may_join_backward && self.launches.is_some())
    }

    fn check(&self, batch: &Batch) -> candle_core::Result<()> {
        let numbers = numbers(batch);
        self.checks.iter().try_for_each(|check| check.check(&numbers))
    }

    /// Launches the graph for a batch.
    fn run<M: GraphModel>(
        &mut self,
        model: &M,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<M::Loss, M::Error> {
        self.check(batch).map_err(|e| failed::<M>("forward", e))?;
        self.outputs.part().map_err(|e| failed::<M>("keeping gradients", e))?;
        self.inputs.fill(model, batch, cx.loss_scale)?;
        self.graph.launch().map_err(|e| failed::<M>("launching a step", e))?;
        set_random_position(random_position().wrapping_add(self.drawn));
        let losses = model.losses(&self.outputs.own.scalars)?;
        if let Some(step) = self.optimizer_step(cx) {
            let outcome = on_device(&mut *step.optimizer)
                .and_then(|device| device.step_outcome(&step.ctl))
                .map_err(train_step::Error::from)?;
            step.applied = Some(outcome);
        }
        self.outputs.report(&cx.sink)?;
        Ok(losses)
    }

    /// Runs a batch eagerly, for the results, then launches the graph from the same buffers and
    /// compares.
    fn compare<M: GraphModel>(
        &self,
        model: &M,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<(Computed, Result<(), Refusal>), M::Error> {
        self.inputs.fill(model, batch, cx.loss_scale)?;
        let before = ForwardState::of(model).map_err(copying::<M>)?;
        let (computed, _) = self.inputs.compute(model, batch)?;
        let after = ForwardState::of(model).map_err(copying::<M>)?;
        before.restore(model).map_err(copying::<M>)?;
        if let Some(OptimizerStep { optimizer, ctl, .. }) = self.optimizer_step(cx) {
            // A skipped step changes nothing.
            let ctl = StepCtl { found_inf: FoundInf::Known(true), ..*ctl };
            let mut skipped = OptimizerStep::new(&mut **optimizer, ctl);
            optimizer::prepare(&mut skipped, model.tensors(), &self.outputs.own.grads)?;
        }
        let refusal = match self.graph.launch() {
            Ok(()) => self
                .difference(model, &computed, &after.buffers)
                .map_err(|e| failed::<M>("comparing results", e))?,
            Err(e) => Some(format!("launch failed: {e}")),
        };
        after.restore(model).map_err(copying::<M>)?;
        Ok((computed, refusal.map_or(Ok(()), Err)))
    }

    /// Describes a difference between launch and eager step.
    fn difference<M: GraphModel>(
        &self,
        model: &M,
        computed: &Computed,
        buffers: &[Tensor],
    ) -> candle_core::Result<Option<Refusal>> {
        let own = &self.outputs.own;
        let differs = |what: &str| {
            Some(format!(
                "{what} of a graph launch differs from the eager step: a value that changes from step to \
                 step is computed on the host, or operators sum in no fixed order"
            ))
        };
        if !same_bits(&own.scalars.values, &computed.scalars.values)? {
            return Ok(differs("the loss or another scalar"));
        }
        for ((index, own), (_, grad)) in own.grads.iter().zip(&computed.grads) {
            if !same_bits(own, grad)? {
                let name = &model.tensors().params.specs[*index].name;
                return Ok(differs(&format!("the gradient of `{name}`")));
            }
        }
        let own = model.buffers().tensors.iter().zip(&model.buffers().specs);
        for ((own, spec), after) in own.zip(buffers) {
            if !same_bits(own, after)? {
                return Ok(differs(&format!("the buffer `{}`", spec.name)));
            }
        }
        Ok(None)
    }
}

/// Runs a batch eagerly on fixed tensors, for the results, then captures the same step, and the
/// optimizer step.
fn capture<M: GraphModel>(
    model: &M,
    batch: &Batch,
    cx: &mut StepContext<'_>,
) -> Result<(Computed, Result<Step, Refusal>), M::Error> {
    let device = model.inputs().device().as_cuda_device().map_err(|e| failed::<M>("capture", e))?;
    let inputs = Inputs::new(model, batch, cx.loss_scale)?;
    let start = random_position();
    // From here to the end of the capture candle keeps the data it sends.
    let kept = device.enable_cuda_graph_htod_cache();
    let (computed, drawn) = inputs.compute(model, batch)?;
    let end = start.wrapping_add(drawn);
    if random_position() != end {
        return Ok((computed, Err(DRAWS.to_owned())));
    }
    let outputs = match Outputs::like(&computed) {
        Ok(outputs) => outputs,
        Err(e) => return Ok((computed, Err(e.to_string()))),
    };
    let mut step = cx.step.as_mut().filter(|step| step.may_join_backward);
    let ready =
        step.as_mut().map(|step| optimizer::prepare(step, model.tensors(), &outputs.own.grads));
    let launches = ready.transpose()?.flatten();
    let recorded = Graph::of(&device.cuda_stream(), || {
        let (computed, checks) = inputs.capture(model, batch)?;
        outputs.take(&computed).map_err(|e| failed::<M>("keeping results", e))?;
        if let Some(step) = step.as_mut().filter(|_| launches.is_some()) {
            optimizer::launch(step, model.tensors(), &outputs.own.grads)?;
        }
        Ok::<_, M::Error>(checks)
    });
    drop(kept);
    let has_drawn = random_position() != end.wrapping_add(drawn);
    set_random_position(end);
    let (graph, checks) = match recorded {
        Ok(_) if has_drawn => return Ok((computed, Err(DRAWS.to_owned()))),
        Ok(recorded) => recorded,
        Err(why) => {
            settle(model, &inputs, batch)?;
            return Ok((computed, Err(why)));
        }
    };
    if graph.kept > 0 {
        let text = format!(
            "compile: {} tensors created in a step outlive it, but have no memory outside of the graph: do \
             not use mode `reduce-overhead` or `max-autotune`, or backend `cudagraphs`",
            graph.kept
        );
        return Err(M::error(text, None));
    }
    let addresses = addresses(model).map_err(|e| failed::<M>("lending a tensor", e))?;
    let thread = thread::current().id();
    let random_key = random_key();
    let step =
        Step { graph, inputs, outputs, checks, addresses, thread, launches, drawn, random_key };
    Ok((computed, Ok(step)))
}

const DRAWS: &str = "random numbers are drawn on the host in each step, by `rand`, `randn` or `gumbel_softmax`, or for a mask of `f64`";

/// Runs a step after a failed capture. If the model keeps tensors of the capture, they have no
/// memory, and freeing each causes an error of the driver, once: this happens here instead of in a
/// later step. Buffers and random position are unchanged.
fn settle<M: GraphModel>(model: &M, inputs: &Inputs, batch: &Batch) -> Result<(), M::Error> {
    let device = model.inputs().device().as_cuda_device().map_err(|e| failed::<M>("capture", e))?;
    let before = ForwardState::of(model).map_err(copying::<M>)?;
    for _ in 0..MOST_KEPT {
        let computed = inputs.compute(model, batch);
        let freed = device.cuda_stream().context().check_err();
        if computed.is_ok() && freed.is_ok() {
            break;
        }
    }
    before.restore(model).map_err(copying::<M>)
}

/// Maximum number of such tensors, freed one after another.
const MOST_KEPT: usize = 16;

/// Addresses of weights and buffers.
fn addresses<M: GraphModel>(model: &M) -> candle_core::Result<Vec<u64>> {
    let all = model.tensors().params.tensors.iter().chain(&model.buffers().tensors);
    all.map(|tensor| Ok(DeviceSlice::try_from(tensor)?.ptr)).collect()
}

/// Returns why no step of this model can be captured.
fn obstacle<M: GraphModel>(model: &M) -> Option<Refusal> {
    if let Err(error) = addresses(model) {
        return Some(error.to_string());
    }
    let device = model.inputs().device().as_cuda_device().ok()?;
    device.is_event_tracking().then(|| TRACKS.to_owned())
}

const TRACKS: &str = "the device tracks its tensors by events, as `Device::new_cuda` and \
    `Device::new_cuda_with_stream` open it, which a capture cannot: open it by `candle_train::cuda_device`";

/// State changed by a forward pass, as it was before the pass.
struct ForwardState {
    buffers: Vec<Tensor>,
    random_position: u64,
}

impl ForwardState {
    fn of<M: GraphModel>(model: &M) -> candle_core::Result<Self> {
        Ok(Self { buffers: model.buffers().copies()?, random_position: random_position() })
    }

    fn restore<M: GraphModel>(&self, model: &M) -> candle_core::Result<()> {
        set_random_position(self.random_position);
        model.buffers().set_all(&self.buffers)
    }
}

fn copying<M: GraphModel>(error: candle_core::Error) -> M::Error {
    failed::<M>("copying buffers", error)
}

fn failed<M: GraphModel>(during: &str, error: impl Into<BoxError>) -> M::Error {
    let error = error.into();
    M::error(format!("{during}: {error}"), Some(error))
}
