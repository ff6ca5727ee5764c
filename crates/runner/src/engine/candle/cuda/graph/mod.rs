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
//! The following would be frozen in a capture without an error, and is detected: random masks
//! (random numbers drawn during capture are counted), values copied to the host (candle returns an
//! error), labels and indices (checked on the host before each launch, see
//! `candle_ops::known_inputs`), tensors that outlive the step (allocations are counted). Values
//! computed on the host from anything other than batch and weights are detected by the comparison,
//! if they have changed by then.
//!
//! The optimizer step is part of the graph (`optimizer.rs`) if the gradients of one batch go to the
//! optimizer unchanged: not with several ranks, gradient accumulation, or several optimizers. The
//! launch of the comparison skips the optimizer step, as after an overflow. In mixed precision a
//! separate launch before it copies the buffers (`optim_wrapper`).
//!
//! Gradients are reported after the launch, in the order of backward. A gradient that is kept until
//! the next launch becomes a copy.

mod optimizer;
mod recording;
mod tensors;

use std::mem::{Discriminant, discriminant};
use std::thread::{self, ThreadId};

use candle_core::Tensor;
use fused_optim::cuda::DeviceSlice;
use fused_optim::{FoundInf, Launches, StepCtl};

use self::recording::Graph;
use self::tensors::{Computed, Inputs, Outputs, compute, same_bits};
use super::numbers;
use crate::data::{Array, ArrayData, Batch};
use crate::engine::candle::CandleEngine;
use crate::engine::candle::gradcheck::ForwardState;
use crate::engine::candle::ops::context::{random_position, set_random_position};
use crate::engine::candle::ops::known_inputs::IndexCheck;
use crate::engine::{CompileReport, Losses, OptimizerStep, StepContext};
use crate::{Error, Result};
use train_step::on_device;

/// Number of eager steps per set of shapes before the capture.
const EAGER: usize = 2;
/// Maximum number of graphs of an engine; each has its own gradients.
const MAX_GRAPHS: usize = 8;
/// Maximum number of sets of shapes that are kept.
const MAX_SHAPES: usize = 64;

/// Graphs of an engine, by shapes.
#[derive(Debug)]
pub(super) struct Graphs {
    fullgraph: bool,
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
}

impl Shapes {
    fn new(batch: &Batch, cx: &StepContext<'_>) -> Self {
        let field = |(name, array): (&str, &Array)| {
            (name.to_owned(), array.shape().to_vec(), discriminant(array.data()))
        };
        let fields = batch.iter().map(field).collect();
        let is_whole = cx.step.as_ref().is_some_and(|step| step.may_join_backward);
        Self { fields, is_whole, autocast: cx.autocast }
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
    pub(super) fn new(fullgraph: bool) -> Self {
        Self { fullgraph, shapes: Vec::new(), refused: None }
    }

    /// Returns the index of the batch's shapes, or `None` if the step must be eager.
    fn find(&mut self, batch: &Batch, cx: &StepContext<'_>) -> Option<usize> {
        if self.refused.is_some() {
            return None;
        }
        let own = Shapes::new(batch, cx);
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
    fn refuse(&mut self, why: Refusal, cx: &mut StepContext<'_>) -> Result<()> {
        // candle's errors may end with a backtrace.
        let why = why.lines().next().unwrap_or_default().to_owned();
        if self.fullgraph {
            return Err(Error::engine(format!(
                "compile: `fullgraph` is set, but a step cannot be captured: {why}"
            )));
        }
        self.shapes.clear();
        cx.note = Some(format!("compile: {WHAT}: not applied: {why}"));
        self.refused = Some(why);
        Ok(())
    }

    /// Runs a training step: captured, as a graph or eager. Records the optimizer's result if the
    /// graph includes its step.
    pub(super) fn step(
        &mut self,
        engine: &CandleEngine,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<Losses> {
        let Some(at) = self.find(batch, cx) else { return engine.step(batch, cx) };
        let is_full = self.is_full();
        let phase = std::mem::replace(&mut self.shapes[at].1, Phase::Eager(0));
        match phase {
            Phase::InForce(mut step) if step.holds(engine, cx)? => {
                let losses = step.run(engine, batch, cx);
                self.shapes[at].1 = Phase::InForce(step);
                losses
            }
            Phase::Captured(step, of) if *batch != of && step.holds(engine, cx)? => {
                let (computed, compared) = step.compare(engine, batch, cx)?;
                match compared {
                    Ok(()) => {
                        let what = if step.launches.is_some() { WHOLE } else { WHAT };
                        let of = describe(&self.shapes[at].0, &step);
                        cx.note = Some(format!("compile: {what}: applied, for batches of {of}"));
                        self.shapes[at].1 = Phase::InForce(step);
                    }
                    Err(why) => self.refuse(why, cx)?,
                }
                computed.report(engine, &cx.sink)
            }
            Phase::Eager(seen) if seen >= EAGER && !is_full => {
                let (computed, captured) = capture(engine, batch, cx)?;
                match captured {
                    Ok(step) => self.shapes[at].1 = Phase::Captured(Box::new(step), batch.clone()),
                    Err(why) => self.refuse(why, cx)?,
                }
                computed.report(engine, &cx.sink)
            }
            // Comparing the captured batch with itself would prove nothing.
            Phase::Captured(step, of) if *batch == of => {
                self.shapes[at].1 = Phase::Captured(step, of);
                engine.step(batch, cx)
            }
            Phase::Eager(seen) => {
                self.shapes[at].1 = Phase::Eager(seen + 1);
                engine.step(batch, cx)
            }
            // A weight has a new address, the optimizer has other launches, or the thread differs
            // (candle's cache is per thread).
            Phase::InForce(_) | Phase::Captured(..) => engine.step(batch, cx),
        }
    }

    /// Adds the graphs in use to the report, or the reason why there are none.
    pub(super) fn report(&self, report: &mut CompileReport) {
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
}

impl Step {
    /// Returns whether all addresses are unchanged; prepares the optimizer step in the graph.
    fn holds(&self, engine: &CandleEngine, cx: &mut StepContext<'_>) -> Result<bool> {
        if self.thread != thread::current().id() || self.addresses != addresses(engine)? {
            return Ok(false);
        }
        match self.optimizer_step(cx) {
            Some(step) => {
                Ok(optimizer::prepare(step, engine, &self.outputs.own.grads)? == self.launches)
            }
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

    fn check(&self, batch: &Batch) -> Result<()> {
        let numbers = numbers(batch);
        let checked = self.checks.iter().try_for_each(|check| check.check(&numbers));
        checked.map_err(|e| failed("forward", e))
    }

    /// Launches the graph for a batch.
    fn run(
        &mut self,
        engine: &CandleEngine,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<Losses> {
        self.check(batch)?;
        self.outputs.part().map_err(|e| failed("keeping gradients", e))?;
        self.inputs.fill(engine, batch, cx.loss_scale)?;
        self.graph.launch().map_err(|e| failed("launching a step", e))?;
        let losses = engine.losses(&self.outputs.own.scalars)?;
        if let Some(step) = self.optimizer_step(cx) {
            let device = on_device(&mut *step.optimizer)?;
            step.applied = Some(device.step_outcome(&step.ctl)?);
        }
        self.outputs.report(&cx.sink)?;
        Ok(losses)
    }

    /// Runs a batch eagerly, for the results, then launches the graph from the same buffers and
    /// compares.
    fn compare(
        &self,
        engine: &CandleEngine,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<(Computed, std::result::Result<(), Refusal>)> {
        self.inputs.fill(engine, batch, cx.loss_scale)?;
        let before = ForwardState::of(engine).map_err(copying)?;
        let (computed, _) = compute(engine, &self.inputs, batch, false)?;
        let after = ForwardState::of(engine).map_err(copying)?;
        before.restore(engine).map_err(copying)?;
        if let Some(OptimizerStep { optimizer, ctl, .. }) = self.optimizer_step(cx) {
            // A skipped step changes nothing.
            let ctl = StepCtl { found_inf: FoundInf::Known(true), ..*ctl };
            let mut skipped = OptimizerStep::new(&mut **optimizer, ctl);
            optimizer::prepare(&mut skipped, engine, &self.outputs.own.grads)?;
        }
        let refusal = match self.graph.launch() {
            Ok(()) => self.difference(engine, &computed, &after.buffers)?,
            Err(e) => Some(format!("launch failed: {e}")),
        };
        after.restore(engine).map_err(copying)?;
        Ok((computed, refusal.map_or(Ok(()), Err)))
    }

    /// Describes a difference between launch and eager step.
    fn difference(
        &self,
        engine: &CandleEngine,
        computed: &Computed,
        buffers: &[Tensor],
    ) -> Result<Option<Refusal>> {
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
                let name = &engine.tensors.params.specs[*index].name;
                return Ok(differs(&format!("the gradient of `{name}`")));
            }
        }
        let own = engine.tensors.buffers.tensors.iter().zip(&engine.tensors.buffers.specs);
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
fn capture(
    engine: &CandleEngine,
    batch: &Batch,
    cx: &mut StepContext<'_>,
) -> Result<(Computed, std::result::Result<Step, Refusal>)> {
    let device = engine.device.as_cuda_device().map_err(|e| failed("capture", e))?;
    let inputs = Inputs::new(batch, cx.loss_scale, &engine.device)?;
    let drawn = random_position();
    // From here to the end of the capture candle keeps the data it sends.
    let kept = device.enable_cuda_graph_htod_cache();
    let (computed, _) = compute(engine, &inputs, batch, false)?;
    if random_position() != drawn {
        return Ok((computed, Err(DRAWS.to_owned())));
    }
    let outputs = match Outputs::like(&computed) {
        Ok(outputs) => outputs,
        Err(e) => return Ok((computed, Err(e.to_string()))),
    };
    let mut step = cx.step.as_mut().filter(|step| step.may_join_backward);
    let ready = step.as_mut().map(|step| optimizer::prepare(step, engine, &outputs.own.grads));
    let launches = ready.transpose()?.flatten();
    let recorded = Graph::of(&device.cuda_stream(), || {
        let (computed, checks) = compute(engine, &inputs, batch, true)?;
        outputs.take(&computed).map_err(|e| failed("keeping results", e))?;
        if let Some(step) = step.as_mut().filter(|_| launches.is_some()) {
            optimizer::launch(step, engine, &outputs.own.grads)?;
        }
        Ok(checks)
    });
    drop(kept);
    let has_drawn = random_position() != drawn;
    set_random_position(drawn);
    let (graph, checks) = match recorded {
        Ok(_) if has_drawn => return Ok((computed, Err(DRAWS.to_owned()))),
        Ok(recorded) => recorded,
        Err(why) => {
            settle(engine, &inputs, batch)?;
            return Ok((computed, Err(why)));
        }
    };
    if graph.kept > 0 {
        return Err(Error::engine(format!(
            "compile: {} tensors created in a step outlive it, but have no memory outside of the graph: do \
             not use mode `reduce-overhead` or `max-autotune`, or backend `cudagraphs`",
            graph.kept
        )));
    }
    let (addresses, thread) = (addresses(engine)?, thread::current().id());
    let step = Step { graph, inputs, outputs, checks, addresses, thread, launches };
    Ok((computed, Ok(step)))
}

const DRAWS: &str = "dropout draws a new mask on the host in each step";

/// Runs a step after a failed capture. If the model keeps tensors of the capture, they have no
/// memory, and freeing each causes an error of the driver, once: this happens here instead of in a
/// later step. Buffers and random position are unchanged.
fn settle(engine: &CandleEngine, inputs: &Inputs, batch: &Batch) -> Result<()> {
    let device = engine.device.as_cuda_device().map_err(|e| failed("capture", e))?;
    let before = ForwardState::of(engine).map_err(copying)?;
    for _ in 0..MOST_KEPT {
        let computed = compute(engine, inputs, batch, false);
        let freed = device.cuda_stream().context().check_err();
        if computed.is_ok() && freed.is_ok() {
            break;
        }
    }
    before.restore(engine).map_err(copying)
}

/// Maximum number of such tensors, freed one after another.
const MOST_KEPT: usize = 16;

/// Addresses of weights and buffers.
fn addresses(engine: &CandleEngine) -> Result<Vec<u64>> {
    let all = engine.tensors.params.tensors.iter().chain(&engine.tensors.buffers.tensors);
    let address = |tensor: &Tensor| Ok(DeviceSlice::try_from(tensor)?.ptr);
    let all = all.map(address).collect::<candle_core::Result<_>>();
    all.map_err(|e| failed("lending a tensor", e))
}

fn copying(error: candle_core::Error) -> Error {
    failed("copying buffers", error)
}

fn failed(during: &str, error: impl Into<train_step::BoxError>) -> Error {
    Error::engine_during(during, error)
}
