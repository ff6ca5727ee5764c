//! Connectionist temporal classification: the loss of labels whose times are unknown.

use candle_core::{DType, Result, Shape, Tensor, bail};

use super::dispatch;
use crate::cast;
use crate::cpu::real::Real;
use crate::graph::device;
use crate::graph::operator::{Input, Operator, apply1};
use crate::state::index_range::integers;

/// Options of [`ctc_loss`]. The defaults are PyTorch's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CtcLossOptions {
    /// The class of frames without a label. Defaults to 0.
    pub blank: usize,
    /// How the losses of a batch are reduced. Defaults to the mean.
    pub reduction: Reduction,
    /// Whether infinite losses and their gradients become 0. Defaults to false.
    pub zero_infinity: bool,
}

/// How the losses of a batch are reduced. Follows: the argument `reduction` of PyTorch's losses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reduction {
    /// The mean. [`ctc_loss`] first divides the loss of each sample by the number of its labels, or
    /// by 1 if it has none.
    #[default]
    Mean,
    /// The sum.
    Sum,
    /// One loss for each sample.
    None,
}

/// Minus the logarithm of the probability of the labels of each sample: of all sequences of one
/// class per frame that become these labels if repetitions are merged, and blanks removed then.
/// `f32` (`f64` for `f64`): a scalar, or `[n]` without a reduction. Follows:
/// `torch.nn.functional.ctc_loss`; A. Graves et al., Connectionist Temporal Classification, 2006,
/// equations 6 to 8.
///
/// Shapes: `log_probs` is `[frames, n, classes]`, from [`log_softmax`](crate::log_softmax);
/// `targets` is `[n, labels]`, integers; `input_lengths` and `target_lengths` are the numbers of
/// frames and of labels of each sample. Frames and labels beyond them do not matter.
///
/// Probabilities are added up as logarithms in `f64`, so long sequences do not underflow. If there
/// is no such sequence, since labels and the blanks between equal ones are more than the frames,
/// the loss is infinite and the gradients are not finite, unless
/// [`zero_infinity`](CtcLossOptions::zero_infinity). A log-probability of negative infinity
/// excludes a class, and has no gradient; NaN propagates.
///
/// The gradient is the mathematical one: minus the probability, given the labels, that a frame has
/// a class. PyTorch's adds `exp(log_probs)`, which is the same in front of a `log_softmax`: its
/// backward pass removes that.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_ops::{CtcLossOptions, ctc_loss, log_softmax};
///
/// // Two samples of five frames and of three frames, with four classes.
/// let logits = Tensor::zeros((5, 2, 4), DType::F32, &Device::Cpu)?;
/// let targets = Tensor::new(&[[1_i64, 2], [3, 0]], &Device::Cpu)?; // the second has one label
/// let options = CtcLossOptions::default();
/// let loss = ctc_loss(&log_softmax(&logits)?, &targets, &[5, 3], &[2, 1], options)?;
/// // 35 sequences of 4^5 are labels 1 and 2, and 6 of 4^3 are label 3.
/// let expected = ((1024_f32 / 35.0).ln() / 2.0 + (64_f32 / 6.0).ln()) / 2.0;
/// assert!((loss.to_scalar::<f32>()? - expected).abs() < 1e-6);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
///
/// No log-probabilities; mismatched shapes; lengths of another batch, or beyond the frames or
/// labels; a blank or a label that is not a class, a label that is the blank; labels that are not
/// integers; an unsupported dtype.
pub fn ctc_loss(
    log_probs: &Tensor,
    targets: &Tensor,
    input_lengths: &[usize],
    target_lengths: &[usize],
    options: CtcLossOptions,
) -> Result<Tensor> {
    let samples = samples(log_probs, targets, [input_lengths, target_lengths], options.blank)?;
    let [log_probs] = cast("ctc_loss", [log_probs])?;
    let losses = match device::dispatches(&log_probs) {
        true => dispatch::ctc_loss(&log_probs, &samples, options.zero_infinity)?,
        false => {
            apply1(CtcLoss { samples, zero_infinity: options.zero_infinity }, [log_probs.clone()])?
        }
    };
    match options.reduction {
        Reduction::None => Ok(losses),
        Reduction::Sum => losses.sum_all(),
        Reduction::Mean => {
            let count = target_lengths.len();
            let weight = |length: &usize| 1.0 / (*length.max(&1) * count) as f64;
            let weights = target_lengths.iter().map(weight).collect::<Vec<_>>();
            let weights = Tensor::from_vec(weights, count, losses.device())?;
            (&losses * weights.to_dtype(losses.dtype())?)?.sum_all()
        }
    }
}

/// Checks the arguments.
fn samples(
    log_probs: &Tensor,
    targets: &Tensor,
    [input_lengths, target_lengths]: [&[usize]; 2],
    blank: usize,
) -> Result<Vec<Sample>> {
    let (frames, count, classes) = log_probs.dims3()?;
    let (rows, width) = targets.dims2()?;
    if frames * count * classes == 0 || rows != count {
        bail!(
            "ctc_loss: log_probs of shape {:?} with targets of shape {:?}; they must be [frames, n, classes], not empty, \
             and [n, labels]",
            log_probs.shape(),
            targets.shape()
        );
    }
    for (name, lengths, most) in
        [("input_lengths", input_lengths, frames), ("target_lengths", target_lengths, width)]
    {
        if lengths.len() != count || lengths.iter().any(|length| *length > most) {
            bail!(
                "ctc_loss: {name} are {lengths:?}; {count} lengths of at most {most} are expected"
            );
        }
    }
    if blank >= classes {
        bail!("ctc_loss: blank {blank} is none of {classes} classes");
    }
    let targets = integers("ctc_loss", targets)?;
    let mut samples = Vec::with_capacity(count);
    for (i, (frames, length)) in input_lengths.iter().zip(target_lengths).enumerate() {
        let mut states = vec![blank];
        for label in &targets[i * width..][..*length] {
            let class = usize::try_from(*label).ok();
            let Some(class) = class.filter(|class| *class < classes && *class != blank) else {
                bail!(
                    "ctc_loss: label {label} of sample {i} is the blank, or none of {classes} classes"
                );
            };
            states.extend([class, blank]);
        }
        samples.push(Sample { frames: *frames, states });
    }
    Ok(samples)
}

/// The frames and labels of one sample.
pub(crate) struct Sample {
    /// Number of frames.
    pub(crate) frames: usize,
    /// Classes of the states in order: the labels, with a blank in front of each and at the end.
    pub(crate) states: Vec<usize>,
}

/// Whether a path may come to state `s` from state `s - 2`: over a blank between two labels that
/// differ.
pub(crate) fn skips(states: &[usize], s: usize) -> bool {
    s % 2 == 1 && (s == 1 || states[s] != states[s - 2])
}

struct CtcLoss {
    samples: Vec<Sample>,
    zero_infinity: bool,
}

impl Operator<1> for CtcLoss {
    const NAME: &'static str = "ctc_loss";

    fn output(&self, dtype: DType) -> DType {
        if dtype == DType::F64 { dtype } else { DType::F32 }
    }

    fn forward<T: Real>(&self, [log_probs]: [Input<'_>; 1]) -> Result<(Vec<T>, Shape)> {
        let (_, count, classes) = log_probs.shape().dims3()?;
        let values = log_probs.values::<T>()?;
        let loss = |(i, Sample { frames, states }): (usize, &Sample)| {
            let at = |frame: usize, class: usize| values[(frame * count + i) * classes + class];
            let (_, total) = path_sums(*frames, states, |frame, class| at(frame, class).to_f64());
            let loss = T::of(0.0 - total);
            if self.zero_infinity && is_infinite(loss) { T::ZERO } else { loss }
        };
        Ok((self.samples.iter().enumerate().map(loss).collect(), count.into()))
    }

    fn backward<T: Real>(
        &self,
        [log_probs]: [Input<'_>; 1],
        _losses: Input<'_>,
        dy: Input<'_>,
    ) -> Result<[Option<Vec<T>>; 1]> {
        let (_, count, classes) = log_probs.shape().dims3()?;
        let (values, dy) = (log_probs.values::<T>()?, dy.values::<T>()?);
        let mut dx = vec![T::ZERO; values.len()];
        for (i, Sample { frames, states }) in self.samples.iter().enumerate() {
            let row = |frame: usize| (frame * count + i) * classes;
            let at = |frame: usize, class: usize| values[row(frame) + class].to_f64();
            let (before, total) = path_sums(*frames, states, at);
            if is_infinite(T::of(0.0 - total)) {
                let fill = T::of(if self.zero_infinity { 0.0 } else { f64::NAN });
                (0..*frames).for_each(|frame| dx[row(frame)..][..classes].fill(fill));
                continue;
            }
            // Paths from the end have the same rules.
            let turned: Vec<_> = states.iter().rev().copied().collect();
            let (mut after, _) =
                path_sums(*frames, &turned, |frame, class| at(frames - 1 - frame, class));
            after.reverse();
            let dy = dy[i].to_f64();
            for (j, (before, after)) in before.iter().zip(&after).enumerate() {
                let (frame, class) = (j / states.len(), states[j % states.len()]);
                // Both have the log-probability of this frame. If that is infinite, so are they.
                if *before != f64::NEG_INFINITY {
                    let share = (before + after - at(frame, class) - total).exp();
                    dx[row(frame) + class] += T::of(-dy * share);
                }
            }
        }
        Ok([Some(dx)])
    }
}

fn is_infinite<T: Real>(loss: T) -> bool {
    loss.to_f64() == f64::INFINITY
}

/// Logarithms of the probabilities of all paths that are in a state after a frame,
/// `[frames, states]`, and of all paths that end in one of the last two states.
fn path_sums(
    frames: usize,
    states: &[usize],
    log_prob: impl Fn(usize, usize) -> f64,
) -> (Vec<f64>, f64) {
    let none = f64::NEG_INFINITY;
    let mut sums = Vec::with_capacity(frames * states.len());
    // Those of the last frame, after two states that are none. At first a path is in front of all.
    let mut last = vec![none; states.len() + 2];
    last[1] = 0.0;
    for frame in 0..frames {
        let sum = |s: usize| {
            let skipping = if skips(states, s) { last[s] } else { none };
            log_sum([last[s + 2], last[s + 1], skipping]) + log_prob(frame, states[s])
        };
        sums.extend((0..states.len()).map(sum));
        last[..2].fill(none);
        last[2..].copy_from_slice(&sums[frame * states.len()..]);
    }
    let total = log_sum([last[states.len() + 1], last[states.len()], none]);
    (sums, total)
}

/// The logarithm of a sum of exponentials.
fn log_sum(terms: [f64; 3]) -> f64 {
    let largest = terms.into_iter().fold(f64::NEG_INFINITY, f64::max);
    match largest == f64::NEG_INFINITY {
        // Or NaN, which `max` ignores.
        true => terms.iter().sum(),
        false => largest + terms.iter().map(|term| (term - largest).exp()).sum::<f64>().ln(),
    }
}

#[cfg(test)]
mod tests {
    use amp::Autocast;
    use candle_core::Device;

    use super::*;
    use crate::tests::{assert_differentiates, assert_rounds_once, assert_same, flat, run, values};
    use crate::{autocast, composed, log_softmax};

    const NONE: CtcLossOptions =
        CtcLossOptions { blank: 0, reduction: Reduction::None, zero_infinity: false };

    fn targets(rows: &[&[i64]]) -> Tensor {
        Tensor::new(rows.iter().map(|row| row.to_vec()).collect::<Vec<_>>(), &Device::Cpu).unwrap()
    }

    /// Each sequence of classes on its own.
    fn slow(x: &Tensor, labels: &[&[usize]], frames: &[usize], blank: usize) -> Result<Tensor> {
        let (_, _, classes) = x.dims3()?;
        let mut losses = Vec::new();
        for (i, (labels, frames)) in labels.iter().zip(frames).enumerate() {
            let mut terms = Vec::new();
            for path in 0..classes.pow(*frames as u32) {
                let class = |frame: usize| path / classes.pow(frame as u32) % classes;
                let path: Vec<_> = (0..*frames).map(class).collect();
                let mut merged = path.clone();
                merged.dedup();
                merged.retain(|class| *class != blank);
                if merged == *labels {
                    let of = |(frame, class): (usize, &usize)| x.get(frame)?.get(i)?.get(*class);
                    let all = path.iter().enumerate().map(of).collect::<Result<Vec<_>>>()?;
                    terms.push(Tensor::stack(&all, 0)?.sum_all()?);
                }
            }
            losses.push(Tensor::stack(&terms, 0)?.log_sum_exp(0)?.neg()?);
        }
        Tensor::stack(&losses, 0)
    }

    #[test]
    fn ctc_loss_adds_up_all_sequences() {
        // Equal labels; as many frames as needed; no labels.
        let labels: [&[usize]; 4] = [&[1, 1], &[2, 1], &[1, 2], &[]];
        let (frames, lengths) = ([4, 4, 2, 3], [2, 2, 2, 0]);
        // Other values are padding.
        let padded = targets(&[&[1, 1, -1], &[2, 1, 9], &[1, 2, 0], &[i64::MAX, 0, 7]]);
        let inputs = [values("x", &[5, 4, 3])];
        let ours = |t: &[Tensor]| ctc_loss(&t[0], &padded, &frames, &lengths, NONE);
        assert_same("ctc_loss", &inputs, ours, |t| slow(&t[0], &labels, &frames, 0));
        assert_differentiates("ctc_loss", &inputs, ours);
        assert_rounds_once("ctc_loss", &inputs, ours);
        for (reduction, weights) in
            [(Reduction::Sum, [1.0; 4]), (Reduction::Mean, [0.125, 0.125, 0.125, 0.25])]
        {
            let options = CtcLossOptions { reduction, ..NONE };
            let reduced = |t: &[Tensor]| ctc_loss(&t[0], &padded, &frames, &lengths, options);
            assert_same("reduced", &inputs, reduced, |t| {
                let weights = Tensor::new(&weights.map(|w| w as f32), &Device::Cpu)?;
                (slow(&t[0], &labels, &frames, 0)? * weights)?.sum_all()
            });
            assert_differentiates("reduced", &inputs, reduced);
        }
        let labels: [&[usize]; 2] = [&[0, 0], &[1]];
        let (padded, inputs) = (targets(&[&[0, 0], &[1, 2]]), [values("x", &[4, 2, 3])]);
        let last = CtcLossOptions { blank: 2, ..NONE };
        let ours = |t: &[Tensor]| ctc_loss(&t[0], &padded, &[4, 3], &[2, 1], last);
        assert_same("the last class", &inputs, ours, |t| slow(&t[0], &labels, &[4, 3], 2));
        let logits = |t: &[Tensor]| ours(&[log_softmax(&t[0])?]);
        assert_differentiates("of logits", &inputs, logits);
    }

    #[test]
    fn impossible_labels_have_an_infinite_loss() {
        // Two equal labels need three frames; none of the frames has the class 2; no frames.
        let padded = targets(&[&[1, 1], &[1, 2], &[2, 0], &[0, 0], &[1, 0]]);
        let (frames, lengths) = ([2, 3, 3, 0, 0], [2, 2, 1, 0, 1]);
        let mut x = flat(&values("x", &[3, 5, 3]));
        (0..3).for_each(|frame| x[frame * 15 + 2 * 3 + 2] = f32::NEG_INFINITY);
        // A class that is not needed.
        x[2] = f32::NEG_INFINITY;
        let inputs = [Tensor::from_vec(x, (3, 5, 3), &Device::Cpu).unwrap()];
        let of = |zero_infinity| {
            let options = CtcLossOptions { zero_infinity, ..NONE };
            run(&inputs, |t| ctc_loss(&t[0], &padded, &frames, &lengths, options)).unwrap()
        };
        for [plain, zeroed] in [[false, true].map(of), composed(|| [false, true].map(of))] {
            let losses = flat(&plain[0]);
            let is_infinite: Vec<_> = losses.iter().map(|loss| *loss == f32::INFINITY).collect();
            assert_eq!(is_infinite, [true, false, true, false, true], "{losses:?}");
            assert!(losses[1].is_finite() && losses[3] == 0.0);
            let zeroes = flat(&zeroed[0]);
            assert_eq!(zeroes, [0.0, losses[1], 0.0, 0.0, 0.0]);
            let sample = |t: &Tensor, i: usize| flat(&t.narrow(1, i, 1).unwrap());
            assert!(sample(&plain[1], 0)[..6].iter().any(|g| !g.is_finite()));
            assert_eq!(sample(&plain[1], 0)[6..], [0.0; 3]);
            assert_eq!(sample(&plain[1], 1), sample(&zeroed[1], 1));
            for i in [0, 2, 3, 4] {
                assert_eq!(sample(&zeroed[1], i), [0.0; 9], "sample {i}");
            }
        }
    }

    #[test]
    fn negative_infinity_excludes_a_class_and_nan_propagates() {
        let mut x = flat(&values("x", &[3, 1, 3]));
        (x[1], x[5]) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        let padded = targets(&[&[1]]);
        let of = |x: Vec<f32>| {
            let x = [Tensor::from_vec(x, (3, 1, 3), &Device::Cpu).unwrap()];
            run(&x, |t| ctc_loss(&t[0], &padded, &[3], &[1], NONE)).unwrap()
        };
        // Label 1 in the second frame, the third one or both.
        let expected = -f64::from(x[0])
            - [x[4] + x[6], x[4] + x[7], x[3] + x[7]]
                .iter()
                .map(|v| f64::from(*v).exp())
                .sum::<f64>()
                .ln();
        for got in [of(x.clone()), composed(|| of(x.clone()))] {
            assert!((f64::from(flat(&got[0])[0]) - expected).abs() < 1e-5, "{}", got[0]);
            let gradient = flat(&got[1]);
            assert!(gradient.iter().all(|g| g.is_finite()), "{gradient:?}");
            assert_eq!([gradient[1], gradient[2], gradient[5], gradient[8]], [0.0; 4]);
        }
        for at in [0, 4, 7] {
            let mut x = x.clone();
            x[at] = f32::NAN;
            for got in [of(x.clone()), composed(|| of(x.clone()))] {
                assert!(flat(&got[0])[0].is_nan(), "NaN at {at}");
            }
        }
    }

    /// The probability of these labels is about `exp(-50_000)`.
    #[test]
    fn long_sequences_do_not_underflow() {
        let x = (Tensor::ones((1000, 1, 5), DType::F32, &Device::Cpu).unwrap() * -50.0).unwrap();
        let padded = Tensor::from_vec([1_i64, 2].repeat(150), (1, 300), &Device::Cpu).unwrap();
        let all = run(&[x], |t| ctc_loss(&t[0], &padded, &[1000], &[300], NONE)).unwrap();
        // The number of sequences is that of choices of 600 of 1300 things.
        let choices: f64 = (1..=600).map(|i| (f64::from(700 + i) / f64::from(i)).ln()).sum();
        let (loss, expected) = (f64::from(flat(&all[0])[0]), 50_000.0 - choices);
        assert!((loss - expected).abs() < 1e-6 * expected, "{loss}, not {expected}");
        // Each frame has one class.
        let dy = flat(&values("dy", &[1]))[0];
        for frame in flat(&all[1]).chunks(5) {
            let sum: f32 = frame.iter().sum();
            assert!((sum + dy).abs() < 1e-5 * dy.abs(), "{sum}, not {}", -dy);
        }
    }

    #[test]
    fn ctc_loss_refuses_what_does_not_fit() {
        let (x, good) = (values("x", &[4, 2, 3]), targets(&[&[1, 2], &[2, 1]]));
        let error = |x: &Tensor, targets: &Tensor, frames: &[usize], labels: &[usize], blank| {
            let options = CtcLossOptions { blank, ..NONE };
            ctc_loss(x, targets, frames, labels, options).unwrap_err().to_string()
        };
        let (frames, labels) = (&[4, 4][..], &[2, 2][..]);
        for (error, expected) in [
            (error(&values("x", &[0, 2, 3]), &good, &[0, 0], labels, 0), "not empty"),
            (error(&x, &targets(&[&[1, 2]]), frames, labels, 0), "targets of shape [1, 2]"),
            (error(&x, &good, &[4], labels, 0), "input_lengths are [4]; 2 lengths of at most 4"),
            (error(&x, &good, &[4, 5], labels, 0), "input_lengths are [4, 5]"),
            (error(&x, &good, frames, &[2, 3], 0), "target_lengths are [2, 3]; 2 lengths of at m"),
            (error(&x, &good, frames, labels, 3), "blank 3 is none of 3 classes"),
            (error(&x, &good, frames, labels, 1), "label 1 of sample 0 is the blank"),
            (error(&x, &targets(&[&[1, 2], &[2, 3]]), frames, labels, 0), "label 3 of sample 1"),
            (error(&x, &targets(&[&[1, 2], &[-1, 2]]), frames, labels, 0), "label -1 of sample 1"),
            (error(&x, &values("t", &[2, 2]), frames, labels, 0), "must be integers, not F32"),
        ] {
            assert!(error.contains(expected), "{error}, not {expected}");
        }
        let integers = x.to_dtype(DType::I64).unwrap();
        assert!(ctc_loss(&integers, &good, frames, labels, NONE).is_err());
    }

    #[test]
    fn ctc_loss_is_in_f32_under_autocast() {
        let (x, padded) = (values("x", &[4, 1, 3]), targets(&[&[1, 2]]));
        let of = |x: &Tensor| ctc_loss(x, &padded, &[4], &[2], NONE).unwrap();
        for policy in [Autocast::cpu(), Autocast::cuda()] {
            let under = autocast(&policy, || of(&x));
            assert_eq!((under.dtype(), flat(&under)), (DType::F32, flat(&of(&x))));
            let half = x.to_dtype(DType::BF16).unwrap();
            let wide = of(&half.to_dtype(DType::F32).unwrap());
            for got in [of(&half), autocast(&policy, || of(&half))] {
                assert_eq!((got.dtype(), flat(&got)), (DType::F32, flat(&wide)));
            }
        }
        let x = x.to_dtype(DType::F64).unwrap();
        assert_eq!(autocast(&Autocast::cpu(), || of(&x)).dtype(), DType::F64);
    }
}
