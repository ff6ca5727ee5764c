//! A tape of operators, whose backward pass stores a first gradient instead of adding it to zeros.
//!
//! candle's `backward` allocates zeros for every tensor of its graph, and adds a gradient to them
//! for every edge. Within [`record`], an operator of this crate is recorded on a tape, and candle's
//! graph ends at its result. [`Tape::backward`] then traverses the tape. It passes a gradient on
//! without a copy, and adds only if a tensor is used twice. candle's own operators between two of
//! this crate (a reshape, a mean, a custom formula) are a *stretch*: its gradient is computed by
//! candle's `backward`, from the tensor that an operator of this crate used to [`Var`]s and
//! results. The gradient of a reshape is passed on directly, too.
//!
//! Outside of [`record`] operators are nodes of candle's graph, and `loss.backward()` is correct.
//!
//! If stretches share nodes, these are traversed once for each stretch. The stretches of models
//! that add their residual stream by candle's `+` grow with their depth; so the tape records no
//! more operators once [`REPEATS`] nodes have been shared, and the rest is candle's graph.
//! [`add`](crate::add) is an operator of this crate.
//!
//! Invariant: the inputs of an entry are constants, [`Var`]s, results of earlier entries, or ends
//! of stretches that lead to these, so that a gradient is complete once all later entries have
//! computed theirs.

use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::fmt;
use std::rc::Rc;
use std::thread::LocalKey;

use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::backprop::GradStore;
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, DType, Device, Layout, Result, Shape, Storage, Tensor,
    TensorId, Var, bail,
};
use parking_lot::Mutex;

use crate::graph::custom_op::{Differentiable, channels_last, channels_second};
use crate::graph::device;

pub use sources::Sources;

/// Number of shared nodes of stretches at which a tape ends.
const REPEATS: usize = 32;

thread_local! {
    static RECORDING: RefCell<Option<Tape>> = const { RefCell::new(None) };
    static PASS: RefCell<Option<Pass>> = const { RefCell::new(None) };
}

/// Runs `call`, a forward pass, and records its operators. Returns its result, and the tape for the
/// backward pass.
///
/// Gradients come from [`Tape::backward`]; `loss.backward()`, and therefore an optimizer's
/// `backward_step`, returns an error then. Nested tapes are independent, and a gradient that would
/// cross from one to the other is an error. Under [`autocast`](crate::autocast) a [`Var`] is cast
/// once: if it is set between two uses within `call`, the second use sees the old values.
///
/// ```
/// use candle_core::{DType, Device, Tensor, Var};
///
/// let weight = Var::zeros((10, 64), DType::F32, &Device::Cpu)?;
/// let x = Tensor::ones((2, 64), DType::F32, &Device::Cpu)?;
/// let labels = Tensor::new(&[3_i64, 5], &Device::Cpu)?;
/// let (loss, tape) = candle_ops::record(|| {
///     candle_ops::cross_entropy(&candle_ops::linear(&x, &weight, None)?, &labels)
/// });
/// let gradients = tape.backward(&loss?)?;
/// assert_eq!(gradients.get(&weight).unwrap().dims(), [10, 64]);
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn record<R>(call: impl FnOnce() -> R) -> (R, Tape) {
    recording(Tape::default(), call)
}

fn recording<R>(tape: Tape, call: impl FnOnce() -> R) -> (R, Tape) {
    let outer = Restored::set(&RECORDING, tape);
    let result = call();
    let tape = RECORDING.take().unwrap_or_default();
    drop(outer);
    (result, tape)
}

/// The operators of a forward pass.
#[derive(Default)]
#[must_use = "without its backward there are no gradients"]
pub struct Tape {
    entries: Vec<Entry>,
    /// Results of the entries, each by its own id and by the id of the tensor at which candle's
    /// backward ends, which is another one if the result is channels-last.
    made: HashMap<TensorId, TensorId>,
    /// Ends of stretches that an entry has used.
    ends: HashSet<TensorId>,
    /// Nodes of stretches.
    nodes: HashSet<TensorId>,
    /// Those of them that are views of variables.
    views: HashSet<TensorId>,
    repeats: usize,
    /// Root of the [`Sources`] in use.
    root: Option<TensorId>,
    /// The variables on which results depend in candle's graph, one per device.
    roots: Vec<Var>,
    casts: casts::Casts,
}

/// A recorded operator.
struct Entry {
    inputs: Vec<Tensor>,
    y: Tensor,
    backward: Box<dyn Backward>,
    /// The stretches that no earlier entry used.
    stretches: Vec<Stretch>,
}

/// Computes the gradients of the inputs from the inputs, the result, and its gradient.
trait Backward: Fn(&[Tensor], &Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync {}
impl<F> Backward for F where
    F: Fn(&[Tensor], &Tensor, &Tensor) -> Result<Vec<Option<Tensor>>> + Send + Sync
{
}

/// candle's operators between leaves and an input of an operator.
struct Stretch {
    end: Tensor,
    /// Nodes and leaves, in the order of the backward pass.
    nodes: Vec<TensorId>,
    /// Whether the end is a tensor of [`Sources`].
    is_source: bool,
    /// The result of which the end is a reshape, and its shape.
    reshaped: Option<(TensorId, Shape)>,
}

/// The new stretches if the current tape, if any, can record an operator with these inputs.
fn takes(inputs: &[&Tensor]) -> Option<Vec<Stretch>> {
    RECORDING.with_borrow_mut(|tape| {
        let tape = tape.as_mut().filter(|tape| tape.repeats <= REPEATS)?;
        if !inputs.iter().any(|input| input.track_op()) {
            return None;
        }
        let mut stretches = Vec::<Stretch>::with_capacity(inputs.len());
        for input in inputs.iter().rev() {
            if stretches.iter().all(|stretch| stretch.end.id() != input.id()) {
                stretches.extend(tape.stretch(input));
            }
        }
        // Complete gradients are reported first.
        stretches.sort_by_key(|stretch| !stretch.is_source);
        (tape.repeats <= REPEATS).then_some(stretches)
    })
}

/// Applies an operator, on the current tape if possible, else by `in_graph`.
pub(crate) fn apply<D: Differentiable<N>, const N: usize>(
    op: D,
    inputs: [&Tensor; N],
    in_graph: impl FnOnce(D) -> Result<Tensor>,
) -> Result<Tensor> {
    let Some(stretches) = takes(&inputs) else { return in_graph(op) };
    let (storage, shape) = run(&op, inputs)?;
    let end = root(storage.device())?.apply_op1(Recorded(Mutex::new(Some((storage, shape)))))?;
    let y = if op.is_channels_last() { channels_second(&end)? } else { end.clone() };
    let backward = move |inputs: &[Tensor], y: &Tensor, dy: &Tensor| {
        Ok(op.backward(std::array::from_fn(|i| &inputs[i]), y, dy)?.into())
    };
    let inputs = inputs.map(Clone::clone).into();
    let entry = Entry { inputs, y: y.clone(), backward: Box::new(backward), stretches };
    RECORDING.with_borrow_mut(|tape| {
        if let Some(tape) = tape {
            // Added only now: an operator that fails uses no stretch.
            tape.ends.extend(entry.stretches.iter().map(|stretch| stretch.end.id()));
            tape.made.extend([(y.id(), y.id()), (end.id(), y.id())]);
            tape.entries.push(entry);
        }
    });
    Ok(y)
}

/// The tape's variable on this device on which results depend.
fn root(device: Device) -> Result<Var> {
    RECORDING.with_borrow_mut(|tape| {
        let Some(tape) = tape else { return Var::zeros(1, DType::F32, &device) };
        if let Some(root) = tape.roots.iter().find(|root| root.device().same_device(&device)) {
            return Ok(root.clone());
        }
        let root = Var::zeros(1, DType::F32, &device)?;
        tape.roots.push(root.clone());
        Ok(root)
    })
}

/// The operator that returns the result of an entry: candle's backward pass ends there.
struct Recorded(Mutex<Option<(Storage, Shape)>>);

impl CustomOp1 for Recorded {
    fn name(&self) -> &'static str {
        "recorded"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        match self.0.lock().take() {
            Some((Storage::Cpu(y), shape)) => Ok((y, shape)),
            _ => bail!("a result is made once"),
        }
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        match self.0.lock().take() {
            Some((Storage::Cuda(y), shape)) => Ok((y, shape)),
            _ => bail!("a result is made once"),
        }
    }

    fn bwd(&self, _root: &Tensor, y: &Tensor, gradient: &Tensor) -> Result<Option<Tensor>> {
        in_pass(|pass| match pass.made.get(&y.id()) {
            Some(id) if *id == y.id() => pass.add(*id, gradient),
            Some(id) => pass.add(*id, &channels_second(gradient)?),
            None => bail!("a gradient of a result of another tape"),
        })?;
        Ok(None)
    }
}

fn run<const N: usize>(
    op: &impl Differentiable<N>,
    inputs: [&Tensor; N],
) -> Result<(Storage, Shape)> {
    let guards = inputs.map(Tensor::storage_and_layout);
    let mut cpu = Vec::with_capacity(N);
    let mut cuda = Vec::with_capacity(N);
    for (storage, layout) in &guards {
        match &**storage {
            Storage::Cpu(storage) => cpu.push((storage, *layout)),
            Storage::Cuda(storage) => cuda.push((storage, *layout)),
            Storage::Metal(_) => bail!("{}: not on Metal", op.name()),
        }
    }
    if let Ok(inputs) = <[_; N]>::try_from(cpu) {
        let (y, shape) = op.forward(inputs)?;
        return Ok((Storage::Cpu(y), shape));
    }
    let Ok(inputs) = <[_; N]>::try_from(cuda) else {
        bail!("{}: inputs on several devices", op.name())
    };
    let (y, shape) = op.cuda_forward(inputs)?;
    Ok((Storage::Cuda(y), shape))
}

impl fmt::Debug for Tape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tape").field("operators", &self.entries.len()).finish_non_exhaustive()
    }
}

impl Tape {
    /// Whether a tensor with these nodes belongs to [`Sources`].
    fn is_source(&self, nodes: &[&Tensor]) -> bool {
        matches!(nodes, [_, root] if Some(root.id()) == self.root)
    }

    /// The stretch that ends in `input`, if no entry has used it before.
    fn stretch(&mut self, input: &Tensor) -> Option<Stretch> {
        let is_known = self.made.contains_key(&input.id()) || self.ends.contains(&input.id());
        if input.is_variable() || !input.track_op() || is_known {
            return None;
        }
        let nodes = input.sorted_nodes();
        let is_source = self.is_source(&nodes);
        // Not for a variable, which has its own gradient.
        let is_made = |node: &Tensor| self.made.get(&node.id()) == Some(&node.id());
        let at = place(input);
        let base = nodes.iter().find(|node| at.is_some() && is_made(node) && place(node) == at);
        let reshaped = base.map(|base| (base.id(), base.shape().clone()));
        if !is_source {
            let is_leaf = |node: &Tensor| node.is_variable() || self.made.contains_key(&node.id());
            for node in nodes.iter().filter(|node| !is_leaf(node)) {
                self.repeats += usize::from(!self.nodes.insert(node.id()));
            }
            self.views.extend(views(&nodes));
        }
        let nodes = nodes.into_iter().map(Tensor::id).collect();
        Some(Stretch { end: input.clone(), nodes, is_source, reshaped })
    }

    /// The results of candle's own operators on which `loss`, or an operator of the tape, depends,
    /// and results of other tapes. One that is older than the forward pass was carried over from
    /// before it: its gradient would be that of variables as they were then. Views of a variable,
    /// such as its transpose, are not among them: they have its values at any time.
    pub fn graph_nodes(&self, loss: &Tensor) -> Vec<TensorId> {
        let is_leaf = |node: &Tensor| node.is_variable() || self.made.contains_key(&node.id());
        let nodes = loss.sorted_nodes();
        let views: HashSet<_> = views(&nodes).collect();
        let own = nodes.iter().filter(|node| !is_leaf(node)).map(|node| node.id());
        let own = own.filter(|id| !views.contains(id));
        self.nodes.difference(&self.views).copied().chain(own).collect()
    }

    /// Computes the gradients of all [`Var`]s and tensors of [`Sources`] that `loss` depends on. If
    /// `loss` has several elements, the gradients are those of their sum. A loss that depends on no
    /// variable has no gradients, without an error.
    ///
    /// Tensors that are no longer needed are freed during the pass.
    ///
    /// # Errors
    ///
    /// Errors of an operator.
    pub fn backward(self, loss: &Tensor) -> Result<GradStore> {
        let gradients = Rc::new(RefCell::new(GradStore::default()));
        let kept = Rc::clone(&gradients);
        self.backward_with(loss, loss.ones_like()?, move |id, gradient| {
            kept.borrow_mut().insert_id(id, gradient);
            Ok(())
        })?;
        Ok(gradients.take())
    }

    /// Like [`backward`](Self::backward), with `gradient` as the gradient of the loss: 1, or a loss
    /// scale. Calls `ready` with the gradient of each [`Var`], and of each tensor of [`Sources`],
    /// once, as soon as it is complete. The order depends only on the model. `ready` may change the
    /// variable whose gradient it receives.
    ///
    /// ```
    /// use std::{cell::RefCell, rc::Rc};
    ///
    /// use candle_core::{DType, Device, Var};
    ///
    /// let w = Var::ones((2, 2), DType::F32, &Device::Cpu)?;
    /// let (loss, tape) = candle_ops::record(|| candle_ops::relu(&w)?.sum_all());
    /// let (loss, told) = (loss?, Rc::new(RefCell::new(Vec::new())));
    /// let kept = Rc::clone(&told);
    /// tape.backward_with(&loss, loss.ones_like()?, move |id, gradient| {
    ///     kept.borrow_mut().push((id, gradient));
    ///     Ok(())
    /// })?;
    /// assert_eq!(told.borrow()[0].0, w.as_tensor().id());
    /// # Ok::<(), candle_core::Error>(())
    /// ```
    ///
    /// # Errors
    ///
    /// A gradient with another shape or type than the loss; errors of an operator and of `ready`,
    /// which end the pass; a pass within `ready`.
    pub fn backward_with(
        mut self,
        loss: &Tensor,
        gradient: Tensor,
        ready: impl FnMut(TensorId, Tensor) -> Result<()> + 'static,
    ) -> Result<()> {
        if (gradient.shape(), gradient.dtype()) != (loss.shape(), loss.dtype()) {
            bail!("a loss {loss:?} and its gradient {gradient:?} are not alike");
        }
        if PASS.with(|pass| pass.try_borrow_mut().is_err()) {
            bail!("a backward pass within `ready` of another");
        }
        let mut uses = HashMap::new();
        for entry in &self.entries {
            let leaves = entry.inputs.iter().filter(|input| input.is_variable()).map(Tensor::id);
            let nodes = entry.stretches.iter().flat_map(|stretch| stretch.nodes.iter().copied());
            leaves.chain(nodes).for_each(|id| *uses.entry(id).or_insert(0) += 1);
        }
        // Entries keep the tensors that they need; the casts of weights would be kept until the
        // end.
        self.casts = casts::Casts::default();
        let is_leaf = loss.is_variable() || self.made.contains_key(&loss.id());
        let pass = Pass {
            uses,
            made: std::mem::take(&mut self.made),
            waiting: HashMap::new(),
            #[cfg(feature = "cuda")]
            beside: None,
            ready: Box::new(ready),
        };
        let _pass = Restored::set(&PASS, pass);
        if is_leaf {
            in_pass(|pass| {
                pass.add(loss.id(), &gradient)?;
                pass.settle(loss.id())
            })?;
        } else {
            through_candle(loss, gradient)?;
        }
        while let Some(entry) = self.entries.pop() {
            entry.give()?;
        }
        Ok(())
    }
}

impl Entry {
    /// Computes the gradients of the inputs.
    fn give(self) -> Result<()> {
        let Self { inputs, y, backward, stretches } = self;
        if let Some(dy) = in_pass(|pass| Ok(pass.waiting.remove(&y.id())))? {
            let gradients = backward(&inputs, &y, &dy)?;
            for (input, gradient) in inputs.iter().zip(gradients) {
                if let Some(gradient) = gradient.filter(|_| input.track_op()) {
                    in_pass(|pass| pass.add(input.id(), &gradient))?;
                }
            }
        }
        for leaf in inputs.iter().filter(|input| input.is_variable()) {
            in_pass(|pass| {
                pass.use_up(leaf.id());
                pass.settle(leaf.id())
            })?;
        }
        stretches.into_iter().try_for_each(Stretch::give)
    }
}

impl Stretch {
    /// Propagates the gradient of the end to the leaves.
    fn give(self) -> Result<()> {
        let Self { end, nodes, is_source, reshaped } = self;
        let gradient = in_pass(|pass| {
            // Before candle's pass, in which a tensor of `Sources` may become complete.
            nodes.iter().for_each(|id| pass.use_up(*id));
            Ok(if is_source { None } else { pass.waiting.remove(&end.id()) })
        })?;
        match (gradient, reshaped) {
            (None, _) => {}
            (Some(gradient), None) => through_candle(&end, gradient)?,
            (Some(gradient), Some((base, shape))) => {
                in_pass(|pass| pass.add(base, &gradient.reshape(shape)?))?;
            }
        }
        in_pass(|pass| nodes.iter().try_for_each(|id| pass.settle(*id)))
    }
}

/// Identifies the elements of a contiguous tensor in memory: a tensor is a reshape of another in
/// its graph if these are equal.
fn place(x: &Tensor) -> Option<(*const Storage, (usize, usize))> {
    let (storage, layout) = x.storage_and_layout();
    Some((&raw const *storage, layout.contiguous_offsets()?))
}

/// The nodes whose elements are those of variables among them.
fn views<'a>(nodes: &'a [&Tensor]) -> impl Iterator<Item = TensorId> + use<'a> {
    let storage = |node: &Tensor| &raw const *node.storage_and_layout().0;
    let variables = nodes.iter().filter(|node| node.is_variable());
    let of_variables: HashSet<_> = variables.map(|node| storage(node)).collect();
    let is_view = move |node: &&&Tensor| of_variables.contains(&storage(node));
    nodes.iter().filter(is_view).map(|node| node.id())
}

/// Runs candle's backward from a tensor with this gradient, and accumulates the gradients of the
/// leaves.
fn through_candle(end: &Tensor, gradient: Tensor) -> Result<()> {
    let mut gradients = end.apply_op1(Seed(gradient))?.backward()?;
    in_pass(|pass| {
        for leaf in end.sorted_nodes().into_iter().filter(|node| node.is_variable()) {
            if let Some(gradient) = gradients.remove(leaf) {
                pass.add(leaf.id(), &gradient)?;
                pass.settle(leaf.id())?;
            }
        }
        Ok(())
    })
}

/// A scalar whose gradient is the gradient of its input.
struct Seed(Tensor);

impl CustomOp1 for Seed {
    fn name(&self) -> &'static str {
        "seed"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        Ok((CpuStorage::F32(vec![0.0]), ().into()))
    }

    fn cuda_fwd(&self, end: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        Ok((end.device().zeros_impl(&().into(), DType::F32)?, ().into()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, _: &Tensor) -> Result<Option<Tensor>> {
        Ok(Some(self.0.clone()))
    }
}

/// A running backward pass.
struct Pass {
    /// Numbers of entries and stretches that have not yet contributed to a tensor's gradient.
    uses: HashMap<TensorId, usize>,
    /// The same as in the tape.
    made: HashMap<TensorId, TensorId>,
    /// Gradients of results and of ends of stretches, and incomplete gradients of leaves.
    waiting: HashMap<TensorId, Tensor>,
    /// Left beside a gradient.
    #[cfg(feature = "cuda")]
    beside: Option<(TensorId, Tensor)>,
    ready: Box<Ready>,
}

type Ready = dyn FnMut(TensorId, Tensor) -> Result<()>;

/// Changes the pass on this thread.
fn in_pass<R>(call: impl FnOnce(&mut Pass) -> Result<R>) -> Result<R> {
    PASS.with_borrow_mut(|pass| match pass {
        Some(pass) => call(pass),
        None => bail!(
            "`backward` was called on a result of a recorded forward pass, or a tensor of `Sources`: return the loss, \
             and do not call `backward`; who called `record` takes `Tape::backward` or `Tape::backward_with`"
        ),
    })
}

impl Pass {
    fn add(&mut self, id: TensorId, gradient: &Tensor) -> Result<()> {
        let sum = match self.waiting.remove(&id) {
            Some(others) => sum(&others, &gradient.detach())?,
            None => gradient.detach(),
        };
        self.waiting.insert(id, sum);
        Ok(())
    }

    fn use_up(&mut self, id: TensorId) {
        self.uses.entry(id).and_modify(|uses| *uses -= 1);
    }

    /// Reports the gradient of a leaf if it is complete.
    fn settle(&mut self, id: TensorId) -> Result<()> {
        if self.made.contains_key(&id) || self.uses.get(&id).is_some_and(|uses| *uses > 0) {
            return Ok(());
        }
        match self.waiting.remove(&id) {
            Some(gradient) => (self.ready)(id, gradient),
            None => Ok(()),
        }
    }
}

/// Channels-last, if both are; of two types in the wider one.
fn sum(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    let plain = |a: &Tensor, b: &Tensor| match device::add([a, b])? {
        Some(sum) => Ok(sum),
        None if a.dtype() == b.dtype() => a + b,
        None => a.to_dtype(DType::F32)? + b.to_dtype(DType::F32)?,
    };
    match (channels_last(a), channels_last(b)) {
        (Some(a), Some(b)) => channels_second(&plain(&a, &b)?),
        _ => plain(a, b),
    }
}

/// Sets a thread-local value until it is dropped.
struct Restored<T: 'static> {
    key: &'static LocalKey<RefCell<Option<T>>>,
    outer: Option<T>,
}

impl<T> Restored<T> {
    fn set(key: &'static LocalKey<RefCell<Option<T>>>, value: T) -> Self {
        Self { key, outer: key.replace(Some(value)) }
    }
}

impl<T> Drop for Restored<T> {
    fn drop(&mut self) {
        self.key.set(self.outer.take());
    }
}

#[cfg(feature = "cuda")]
pub(crate) mod beside;
pub(crate) mod casts;
mod sources;
#[cfg(test)]
mod tests;
