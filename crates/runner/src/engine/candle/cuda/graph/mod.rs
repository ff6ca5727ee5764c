//! A training step as one launch: captured as a CUDA graph, then launched for each batch of the same shapes.
//!
//! A graph goes on with the addresses and numbers of its capture. So a captured step reads its batch and the loss
//! scale from tensors that stay where they are, into which each is copied before the launch, and writes losses
//! and gradients to such tensors; what it allocates between is the graph's own. Weights, buffers and these are the
//! only memory that outlives it. The sequence, for each set of shapes: a few steps as always; one that runs on the
//! fixed tensors while candle keeps what it sends (shapes, strides, small constants) and is then captured, which
//! runs nothing; one, of another batch, that runs both ways, to be compared bit for bit, running statistics too;
//! from then on launches. Whatever fails on the way is the reason why steps go on as they are written.
//!
//! What a capture would freeze without a word is looked for: random masks (random numbers drawn meanwhile are counted),
//! numbers copied to the host (candle refuses), labels and indices (checked on the host before each launch, see `candle_ops::known_inputs`), tensors that outlive the step (allocations are counted). What a model computes on the host from
//! something that is neither in the batch nor in its weights shows in the comparison, if it changes by then.
//!
//! Where the gradients of one batch are the optimizer's as they are, its step is in the graph (`optimizer.rs`): not of
//! several ranks, whose averages come between, nor of sums of batches, nor of several optimizers. The launch that is
//! compared skips it, as after an overflow. In mixed precision a launch before it copies the buffers (`optim_wrapper`).
//!
//! Gradients are reported after the launch, in the order that backward had. Whoever keeps one until the next
//! launch is left with a copy.

mod optimizer;
mod recording;
mod tensors;

use std::mem::{Discriminant, discriminant};
use std::thread::{self, ThreadId};

use candle_core::Tensor;
use fused_optim::{FoundInf, Launches, StepCtl};

use self::recording::Graph;
use self::tensors::{Computed, Inputs, Outputs, compute, same_bits};
use super::{address, numbers};
use crate::data::{Array, ArrayData, Batch};
use crate::engine::candle::CandleEngine;
use crate::engine::candle::gradcheck::State;
use crate::engine::candle::ops::context::{random_position, set_random_position};
use crate::engine::candle::ops::known_inputs::IndexCheck;
use crate::engine::{CompileReport, Losses, OptimizerStep, StepContext, on_device};
use crate::{Error, Result};

/// How often a set of shapes comes before a step of it is captured.
const EAGER: usize = 2;
/// How many graphs an engine has at most: each has gradients of its own.
const MAX_GRAPHS: usize = 8;
/// Maximum number of sets of shapes that are kept.
const MAX_SHAPES: usize = 64;

/// What there is of graphs, by what they are for.
#[derive(Debug)]
pub(super) struct Graphs {
    fullgraph: bool,
    shapes: Vec<(Shapes, Phase)>,
    refused: Option<String>,
}

/// What a graph is for.
#[derive(Debug, PartialEq)]
struct Shapes {
    /// Names, extents and types of a batch's fields.
    fields: Vec<(String, Vec<usize>, Discriminant<ArrayData>)>,
    /// Whether an optimizer's step is in the graph.
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

/// How far a set of shapes has come.
#[derive(Debug)]
enum Phase {
    /// So many steps as they are written.
    Eager(usize),
    /// Captured from this batch, and not compared yet.
    Captured(Box<Step>, Batch),
    InForce(Box<Step>),
}

/// Why there is no graph, and never will be.
type Refusal = String;

impl Graphs {
    pub(super) fn new(fullgraph: bool) -> Self {
        Self { fullgraph, shapes: Vec::new(), refused: None }
    }

    /// The number of this set of shapes, unless it is to run as it is written.
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

    /// Whether there may be no more of them.
    fn is_full(&self) -> bool {
        let graphs = self.shapes.iter().filter(|(_, phase)| !matches!(phase, Phase::Eager(_)));
        graphs.count() >= MAX_GRAPHS
    }

    /// Ends all attempts, and notes why.
    fn refuse(&mut self, why: Refusal, cx: &mut StepContext<'_>) -> Result<()> {
        // candle's errors may go on with a backtrace.
        let why = why.lines().next().unwrap_or_default().to_owned();
        if self.fullgraph {
            return Err(Error::Engine(format!(
                "compile: `fullgraph`, and a step is no graph: {why}"
            )));
        }
        self.shapes.clear();
        cx.note = Some(format!("compile: {WHAT}: not applied: {why}"));
        self.refused = Some(why);
        Ok(())
    }

    /// A training step, captured, launched, or as it is written; notes what the optimizer's did, if that was in it.
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
            // A comparison of the captured batch with itself would prove nothing.
            Phase::Captured(step, of) if *batch == of => {
                self.shapes[at].1 = Phase::Captured(step, of);
                engine.step(batch, cx)
            }
            Phase::Eager(seen) => {
                self.shapes[at].1 = Phase::Eager(seen + 1);
                engine.step(batch, cx)
            }
            // A weight has moved, the optimizer launches something else, or the thread is another one: what candle
            // keeps is a thread's.
            Phase::InForce(_) | Phase::Captured(..) => engine.step(batch, cx),
        }
    }

    /// Adds what was applied, or why nothing was.
    pub(super) fn report(&self, report: &mut CompileReport) {
        let steps = || self.shapes.iter().filter_map(in_force);
        for (what, is_whole, more) in [
            (WHOLE, true, ""),
            (
                WHAT,
                false,
                "; what an optimizer does with averages of ranks, sums of batches, or beside other \
                optimizers, follows it",
            ),
        ] {
            let own = steps().filter(|(_, step)| step.launches.is_some() == is_whole);
            let of: Vec<String> = own.map(|(shapes, step)| describe(shapes, step)).collect();
            if !of.is_empty() {
                report.applied.push(format!(
                    "{what}, for batches of {}{more}; other shapes, the first steps of each, more than \
                     {MAX_GRAPHS} sets of them and validation run as they are written",
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
                "{WHAT}: not yet: of each set of shapes the step after the first {EAGER} is captured, and the next \
                 one compared with what it is without"
            ));
        }
    }
}

const WHAT: &str = "forward and backward of a step as one launch";
const WHOLE: &str = "forward, backward and the optimizer's step as one launch";

/// A step that is launched, and the shapes that it is for.
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
    /// Where weights and buffers were.
    addresses: Vec<u64>,
    thread: ThreadId,
    /// Those of an optimizer's step that is in it.
    launches: Option<Launches>,
}

impl Step {
    /// Whether all is where it was, and ready for the optimizer's step that is in it.
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

    /// The optimizer's step that is in the graph.
    fn optimizer_step<'c, 'a>(
        &self,
        cx: &'c mut StepContext<'a>,
    ) -> Option<&'c mut OptimizerStep<'a>> {
        cx.step.as_mut().filter(|step| step.may_join_backward && self.launches.is_some())
    }

    fn check(&self, batch: &Batch) -> Result<()> {
        let numbers = numbers(batch);
        let checked = self.checks.iter().try_for_each(|check| check.check(&numbers));
        checked.map_err(|e| failed("forward", &e))
    }

    /// Launches it for a batch.
    fn run(
        &mut self,
        engine: &CandleEngine,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<Losses> {
        self.check(batch)?;
        self.outputs.part().map_err(|e| failed("keeping gradients", &e))?;
        self.inputs.fill(engine, batch, cx.loss_scale)?;
        self.graph.launch().map_err(|e| failed("launching a step", &e))?;
        let losses = engine.losses(&self.outputs.own.scalars)?;
        if let Some(step) = self.optimizer_step(cx) {
            let device = on_device(&mut *step.optimizer)?;
            step.applied = Some(device.step_outcome(&step.ctl)?);
        }
        self.outputs.report(&cx.sink)?;
        Ok(losses)
    }

    /// Runs a batch as it is written, which is what counts, then launches it, from the same buffers.
    fn compare(
        &self,
        engine: &CandleEngine,
        batch: &Batch,
        cx: &mut StepContext<'_>,
    ) -> Result<(Computed, std::result::Result<(), Refusal>)> {
        self.inputs.fill(engine, batch, cx.loss_scale)?;
        let before = State::of(engine).map_err(copying)?;
        let (computed, _) = compute(engine, &self.inputs, batch, false)?;
        let after = State::of(engine).map_err(copying)?;
        before.restore(engine).map_err(copying)?;
        if let Some(OptimizerStep { optimizer, ctl, .. }) = self.optimizer_step(cx) {
            // A skipped step changes nothing.
            let ctl = StepCtl { found_inf: FoundInf::Known(true), ..*ctl };
            let mut skipped = OptimizerStep::new(&mut **optimizer, ctl);
            optimizer::prepare(&mut skipped, engine, &self.outputs.own.grads)?;
        }
        let refusal = match self.graph.launch() {
            Ok(()) => self.difference(engine, &computed, &after.buffers)?,
            Err(e) => Some(format!("launching it: {e}")),
        };
        after.restore(engine).map_err(copying)?;
        Ok((computed, refusal.map_or(Ok(()), Err)))
    }

    /// What the launch has otherwise.
    fn difference(
        &self,
        engine: &CandleEngine,
        computed: &Computed,
        buffers: &[Tensor],
    ) -> Result<Option<Refusal>> {
        let own = &self.outputs.own;
        let differs = |what: &str| {
            Some(format!(
                "{what} would be another one on the next batch: something that changes from step to step is \
                 computed on the host, or operators add up in no fixed order"
            ))
        };
        if !same_bits(&own.scalars.values, &computed.scalars.values)? {
            return Ok(differs("the loss, or a number beside it,"));
        }
        for ((index, own), (_, grad)) in own.grads.iter().zip(&computed.grads) {
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

/// Runs a batch on fixed tensors, which is what counts, then captures that, and the step behind it.
fn capture(
    engine: &CandleEngine,
    batch: &Batch,
    cx: &mut StepContext<'_>,
) -> Result<(Computed, std::result::Result<Step, Refusal>)> {
    let device = engine.device.as_cuda_device().map_err(|e| failed("capture", &e))?;
    let inputs = Inputs::new(batch, cx.loss_scale, &engine.device)?;
    let drawn = random_position();
    // From here to the end of the capture candle keeps what it sends.
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
        outputs.take(&computed).map_err(|e| failed("keeping results", &e))?;
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
        return Err(Error::Engine(format!(
            "compile: {} tensors that a step has made outlive it, and have no memory outside of the graph: leave \
             mode `reduce-overhead` or `max-autotune`, or backend `cudagraphs`, out",
            graph.kept
        )));
    }
    let (addresses, thread) = (addresses(engine)?, thread::current().id());
    let step = Step { graph, inputs, outputs, checks, addresses, thread, launches };
    Ok((computed, Ok(step)))
}

const DRAWS: &str = "dropout draws its masks on the host, another one for each step";

/// After a capture that failed. A tensor of it that the model has kept has no memory, and to free it is an error of
/// the driver's, once: here, and not in a step. Neither buffers nor random numbers are touched.
fn settle(engine: &CandleEngine, inputs: &Inputs, batch: &Batch) -> Result<()> {
    let device = engine.device.as_cuda_device().map_err(|e| failed("capture", &e))?;
    let before = State::of(engine).map_err(copying)?;
    for _ in 0..MOST_KEPT {
        let computed = compute(engine, inputs, batch, false);
        let freed = device.cuda_stream().context().check_err();
        if computed.is_ok() && freed.is_ok() {
            break;
        }
    }
    before.restore(engine).map_err(copying)
}

/// How many tensors a model may have kept, one after the other.
const MOST_KEPT: usize = 16;

/// Where weights and buffers are.
fn addresses(engine: &CandleEngine) -> Result<Vec<u64>> {
    let all = engine.params.tensors.iter().chain(&engine.buffers.tensors);
    all.map(|tensor| Ok(address(tensor)?.ptr)).collect()
}

fn copying(error: candle_core::Error) -> Error {
    failed("copying buffers", &error)
}

fn failed(during: &str, error: &dyn std::error::Error) -> Error {
    Error::Engine(format!("{during}: {error}"))
}
