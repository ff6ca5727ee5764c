//! Recurrent layers: [`Lstm`] and [`Gru`] of whole sequences, with PyTorch's parameters; and
//! candle-nn's own, which compute one step at a time.

use candle_core::{Result, Tensor, bail};
use candle_nn::VarBuilder;
pub use candle_nn::rnn::*;

use super::parameter::parameter;
use super::within_fan_in;
use crate::recurrent::cell::{self, Cell};
use crate::recurrent::{self, Sequences};

/// Options of [`Lstm`] and [`Gru`]. Follows: `torch.nn.LSTM`, always with `batch_first`, without
/// `proj_size`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RnnConfig {
    /// Number of layers, each of which has the outputs of the one before as inputs. Defaults to 1.
    pub num_layers: usize,
    /// Whether layers have biases. Defaults to true.
    pub bias: bool,
    /// Probability of [`dropout`](crate::dropout) between two layers, in training. Defaults to 0.
    pub dropout: f32,
    /// Whether each layer also runs from the end to the start, by weights of its own whose names
    /// end with `_reverse`. Outputs of both directions are concatenated. Defaults to false.
    pub bidirectional: bool,
}

impl Default for RnnConfig {
    fn default() -> Self {
        Self { num_layers: 1, bias: true, dropout: 0.0, bidirectional: false }
    }
}

/// The states of an [`Lstm`]: of each layer, forward before reverse, `[layers * directions, batch,
/// hidden]`.
#[derive(Clone, Debug)]
pub struct LstmState {
    /// Hidden states.
    pub h: Tensor,
    /// Cell states.
    pub c: Tensor,
}

/// Long short-term memory. Parameters are `weight_ih_l0` `[4 * hidden, inputs]`,
/// `weight_hh_l0` `[4 * hidden, hidden]`, `bias_ih_l0` and `bias_hh_l0` `[4 * hidden]`, and those
/// of further layers and directions, with gates in the order input, forget, cell, output, as in
/// PyTorch and candle-nn.
///
/// On the CPU each layer and direction is one operator with its own backward pass through time;
/// within a call the states are in `f32` (`f64` for `f64`), also under autocast, and are rounded
/// with the outputs.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_ops::nn::{Lstm, RnnConfig, VarBuilder, VarMap};
///
/// let vars = VarMap::new();
/// let vb = VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu);
/// let config = RnnConfig { bidirectional: true, ..RnnConfig::default() };
/// let lstm = Lstm::new(3, 8, config, vb.pp("lstm"))?;
/// let x = Tensor::randn(0f32, 1.0, (2, 5, 3), &Device::Cpu)?;
/// let (y, state) = lstm.forward(&x)?;
/// assert_eq!((y.dims(), state.h.dims()), (&[2, 5, 16][..], &[2, 2, 8][..]));
/// // The second sample has only three steps; both go on from the last state.
/// let (y, _) = lstm.forward_with(&x, Some(&state), Some(&[5, 3]))?;
/// assert_eq!(y.get(1)?.narrow(0, 3, 2)?.abs()?.sum_all()?.to_scalar::<f32>()?, 0.0);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Lstm(Layers);

impl Lstm {
    /// A layer whose parameters are initialized uniformly within `1 / sqrt(hidden)`, as in PyTorch.
    ///
    /// # Errors
    ///
    /// No layers or no hidden units; a dropout that is not at least 0 and less than 1; errors of
    /// the builder; a parameter larger than the memory.
    pub fn new(
        inputs: usize,
        hidden: usize,
        config: RnnConfig,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        Layers::new::<cell::Lstm>([inputs, hidden], config, &vb).map(Self)
    }

    /// Runs over whole sequences `[batch, times, inputs]` from states of 0. Returns the outputs,
    /// `[batch, times, directions * hidden]`, and the final states.
    ///
    /// # Errors
    ///
    /// Mismatched shapes; an unsupported dtype.
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, LstmState)> {
        self.forward_with(x, None, None)
    }

    /// Like [`forward`](Self::forward), from a state, and with a length of each sample, as with
    /// PyTorch's packed sequences: outputs at later times are 0, the final state is that after the
    /// last step, and the reverse direction begins there.
    ///
    /// # Errors
    ///
    /// The errors of [`forward`](Self::forward); a state or lengths of another batch; a length
    /// that is more than `times`.
    pub fn forward_with(
        &self,
        x: &Tensor,
        state: Option<&LstmState>,
        lengths: Option<&[usize]>,
    ) -> Result<(Tensor, LstmState)> {
        let state = state.map(|LstmState { h, c }| [h, c]);
        let state = state.as_ref().map(|state| &state[..]);
        let (y, mut last) = self.0.forward::<cell::Lstm>(x, state, lengths)?;
        match (last.pop(), last.pop()) {
            (Some(c), Some(h)) => Ok((y, LstmState { h, c })),
            _ => bail!("lstm: two states"),
        }
    }
}

/// Gated recurrent units. As [`Lstm`], with the gates reset, update, new, and the hidden state
/// alone. As in PyTorch the bias `bias_hh_l0` of the new gate is within the product with the reset
/// gate.
#[derive(Clone, Debug)]
pub struct Gru(Layers);

impl Gru {
    /// As [`Lstm::new`].
    ///
    /// # Errors
    ///
    /// The errors of [`Lstm::new`].
    pub fn new(
        inputs: usize,
        hidden: usize,
        config: RnnConfig,
        vb: VarBuilder<'_>,
    ) -> Result<Self> {
        Layers::new::<cell::Gru>([inputs, hidden], config, &vb).map(Self)
    }

    /// As [`Lstm::forward`]; the state is `[layers * directions, batch, hidden]`.
    ///
    /// # Errors
    ///
    /// The errors of [`Lstm::forward`].
    pub fn forward(&self, x: &Tensor) -> Result<(Tensor, Tensor)> {
        self.forward_with(x, None, None)
    }

    /// As [`Lstm::forward_with`].
    ///
    /// # Errors
    ///
    /// The errors of [`Lstm::forward_with`].
    pub fn forward_with(
        &self,
        x: &Tensor,
        state: Option<&Tensor>,
        lengths: Option<&[usize]>,
    ) -> Result<(Tensor, Tensor)> {
        let state = state.map(|state| [state]);
        let state = state.as_ref().map(|state| &state[..]);
        let (y, mut last) = self.0.forward::<cell::Gru>(x, state, lengths)?;
        match last.pop() {
            Some(state) => Ok((y, state)),
            None => bail!("gru: a state"),
        }
    }
}

/// The parameters of both.
#[derive(Clone, Debug)]
struct Layers {
    /// By layer, and in it by direction.
    weights: Vec<Weights>,
    hidden: usize,
    config: RnnConfig,
}

#[derive(Clone, Debug)]
struct Weights {
    input: Tensor,
    state: Tensor,
    input_bias: Option<Tensor>,
    state_bias: Tensor,
}

impl Layers {
    fn new<C: Cell>(
        [inputs, hidden]: [usize; 2],
        config: RnnConfig,
        vb: &VarBuilder<'_>,
    ) -> Result<Self> {
        let RnnConfig { num_layers, bias, dropout, bidirectional } = config;
        if num_layers * hidden == 0 || !(0.0..1.0).contains(&dropout) {
            bail!(
                "{}: {hidden} hidden units, {config:?}: need at least one layer and unit, and a dropout in [0, 1)",
                C::NAME
            );
        }
        let (init, gates) = (within_fan_in(hidden), C::GATES * hidden);
        let directions = if bidirectional { &["", "_reverse"][..] } else { &[""] };
        let mut weights = Vec::new();
        for layer in 0..num_layers {
            let inputs = if layer == 0 { inputs } else { directions.len() * hidden };
            for direction in directions {
                let name = |of: &str| format!("{of}_l{layer}{direction}");
                let tensor = |of, columns| parameter((gates, columns), &name(of), init, vb);
                let vector = |of: &str| parameter(gates, &name(of), init, vb);
                weights.push(Weights {
                    input: tensor("weight_ih", inputs)?,
                    state: tensor("weight_hh", hidden)?,
                    input_bias: bias.then(|| vector("bias_ih")).transpose()?,
                    state_bias: match bias {
                        true => vector("bias_hh")?,
                        false => Tensor::zeros(gates, vb.dtype(), vb.device())?,
                    },
                });
            }
        }
        Ok(Self { weights, hidden, config })
    }

    /// The outputs of the last layer, and the final states of all.
    fn forward<C: Cell>(
        &self,
        x: &Tensor,
        state: Option<&[&Tensor]>,
        lengths: Option<&[usize]>,
    ) -> Result<(Tensor, Vec<Tensor>)> {
        let (batch, times, _) = x.dims3()?;
        let lengths = lengths.map_or_else(|| vec![times; batch], <[_]>::to_vec);
        if lengths.len() != batch || lengths.iter().any(|length| *length > times) {
            bail!("{}: lengths {lengths:?} for {batch} samples of {times} steps", C::NAME);
        }
        let shape = [self.weights.len(), batch, self.hidden];
        if let Some(other) = state.into_iter().flatten().find(|state| state.dims() != shape) {
            bail!("{}: a state of shape {:?} in place of {shape:?}", C::NAME, other.dims());
        }
        let mut last = vec![Vec::new(); if C::HAS_CELL { 2 } else { 1 }];
        let mut x = without_padding(x, &lengths)?;
        let directions = if self.config.bidirectional { 2 } else { 1 };
        for (layer, weights) in self.weights.chunks(directions).enumerate() {
            if layer > 0 {
                x = crate::dropout(&x, self.config.dropout)?;
            }
            let mut outputs = Vec::with_capacity(directions);
            for (direction, weights) in weights.iter().enumerate() {
                let initial = |i: usize| match state {
                    Some(state) => {
                        let own = state[i].get(layer * directions + direction)?;
                        own.to_dtype(weights.state_bias.dtype())
                    }
                    None => {
                        Tensor::zeros((batch, self.hidden), weights.state_bias.dtype(), x.device())
                    }
                };
                let initial = (0..last.len()).map(initial).collect::<Result<Vec<_>>>()?;
                let sequences = Sequences {
                    batch,
                    times,
                    hidden: self.hidden,
                    lengths: lengths.clone(),
                    is_reverse: direction == 1,
                };
                let product = crate::linear(&x, &weights.input, weights.input_bias.as_ref())?;
                let (y, states) = recurrent::apply::<C>(
                    &product,
                    &weights.state,
                    &weights.state_bias,
                    &initial,
                    sequences,
                )?;
                outputs.push(y);
                last.iter_mut().zip(states).for_each(|(all, state)| all.push(state));
            }
            x = if let [y] = &outputs[..] { y.clone() } else { Tensor::cat(&outputs, 2)? };
        }
        Ok((x, last.iter().map(|states| Tensor::stack(states, 0)).collect::<Result<_>>()?))
    }
}

/// `x` with zeros at the times after the end of a sample: a NaN there would be one in the gradients
/// of weights, since zero times it is NaN.
fn without_padding(x: &Tensor, lengths: &[usize]) -> Result<Tensor> {
    let (batch, times, _) = x.dims3()?;
    if lengths.iter().all(|length| *length == times) {
        return Ok(x.clone());
    }
    let is_kept =
        lengths.iter().flat_map(|length| (0..times).map(move |at| u8::from(at < *length)));
    let is_kept = Tensor::from_iter(is_kept, x.device())?.reshape((batch, times, 1))?;
    is_kept.broadcast_as(x.shape())?.where_cond(x, &x.zeros_like()?)
}
