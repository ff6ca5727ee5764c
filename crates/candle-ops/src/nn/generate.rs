//! Choosing the next token of a text from a model's logits.

use candle_core::{Result, bail};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{Rng, SeedableRng};

/// Options of [`Llama::generate`](super::Llama::generate), named as those of transformers. The
/// default draws up to 100 tokens by their probabilities.
#[derive(Clone, Debug, PartialEq)]
pub struct GenerateOptions {
    /// Number of tokens to generate at most.
    pub max_new_tokens: usize,
    /// Divisor of the logits: below 1 it favours likely tokens; 0 always takes the most likely one,
    /// the first of equal ones.
    pub temperature: f64,
    /// Draws only from this many most likely tokens; from all if 0.
    pub top_k: usize,
    /// Draws only from the most likely tokens of `top_k` whose probabilities together just reach
    /// this number; from all if 1.
    pub top_p: f64,
    /// Seed of the draws: the same one gives the same text.
    pub seed: u64,
    /// Tokens that end the text, and do not belong to it.
    pub stop_tokens: Vec<u32>,
}

impl Default for GenerateOptions {
    fn default() -> Self {
        Self {
            max_new_tokens: 100,
            temperature: 1.0,
            top_k: 0,
            top_p: 1.0,
            seed: 0,
            stop_tokens: Vec::new(),
        }
    }
}

/// Draws tokens by their logits.
pub(super) struct Sampler<'a> {
    options: &'a GenerateOptions,
    random: ChaCha8Rng,
}

impl<'a> Sampler<'a> {
    pub(super) fn new(options: &'a GenerateOptions) -> Result<Self> {
        let GenerateOptions { temperature, top_p, .. } = *options;
        if !(temperature >= 0.0 && temperature.is_finite()) {
            bail!("generate: the temperature must be 0 or more, got {temperature}");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            bail!("generate: top_p must be in (0, 1], got {top_p}");
        }
        Ok(Self { options, random: ChaCha8Rng::seed_from_u64(options.seed) })
    }

    /// Draws a token.
    ///
    /// # Errors
    ///
    /// A logit that is NaN or positive infinity; no finite logit.
    pub(super) fn draw(&mut self, logits: &[f32]) -> Result<u32> {
        let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        if let Some(token) = logits.iter().position(|l| l.is_nan() || *l == f32::INFINITY) {
            bail!("generate: the logit of token {token} is {}", logits[token]);
        }
        if largest == f32::NEG_INFINITY {
            bail!("generate: none of {} logits is finite", logits.len());
        }
        let GenerateOptions { temperature, top_k, top_p, .. } = *self.options;
        if temperature == 0.0 {
            return Ok(logits.iter().position(|l| *l == largest).unwrap_or(0) as u32);
        }
        let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
        let logit = |token: &u32| logits[*token as usize];
        if top_k > 0 || top_p < 1.0 {
            // A stable sort: of equal logits the first token comes first.
            tokens.sort_by(|a, b| logit(b).total_cmp(&logit(a)));
            tokens.truncate(if top_k > 0 { top_k } else { tokens.len() });
        }
        let weight = |token: &u32| (f64::from(logit(token) - largest) / temperature).exp();
        let weights: Vec<f64> = tokens.iter().map(weight).collect();
        let mut sum: f64 = weights.iter().sum();
        if top_p < 1.0 {
            let most = top_p * sum;
            sum = 0.0;
            let reached = weights.iter().position(|weight| {
                sum += weight;
                sum >= most
            });
            tokens.truncate(reached.map_or(tokens.len(), |last| last + 1));
        }
        // In [0, 1), with 53 bits.
        let mut rest = (self.random.next_u64() >> 11) as f64 / (1_u64 << 53) as f64 * sum;
        let drawn = tokens.iter().zip(&weights).find(|(_, weight)| {
            rest -= **weight;
            rest < 0.0
        });
        // Rounding may leave a rest: the last token that has a probability.
        let last = || tokens.iter().zip(&weights).rfind(|(_, weight)| **weight > 0.0);
        Ok(*drawn.or_else(last).expect("the largest logit has weight 1").0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(options: &GenerateOptions, logits: &[f32]) -> Vec<usize> {
        let mut sampler = Sampler::new(options).unwrap();
        let mut counts = vec![0; logits.len()];
        (0..10_000).for_each(|_| counts[sampler.draw(logits).unwrap() as usize] += 1);
        counts
    }

    /// Probabilities 0.5, 0.1, 0.3, 0.1, 0.
    fn logits() -> Vec<f32> {
        [0.5_f32, 0.1, 0.3, 0.1, 0.0].map(f32::ln).to_vec()
    }

    fn close(counts: &[usize], shares: &[f64]) {
        for (count, share) in counts.iter().zip(shares) {
            // Four standard deviations of a count are 200 at most.
            assert!((*count as f64 - 1e4 * share).abs() <= 200.0, "{counts:?} {shares:?}");
            assert!((*count == 0) == (*share == 0.0), "{counts:?} {shares:?}");
        }
    }

    #[test]
    fn shares_are_those_of_temperature_top_k_and_top_p() {
        let of = |temperature, top_k, top_p| {
            let options = GenerateOptions { temperature, top_k, top_p, ..Default::default() };
            counts(&options, &logits())
        };
        close(&of(1.0, 0, 1.0), &[0.5, 0.1, 0.3, 0.1, 0.0]);
        let squares = [0.25, 0.01, 0.09, 0.01, 0.0].map(|square| square / 0.36);
        close(&of(0.5, 0, 1.0), &squares);
        close(&of(1.0, 2, 1.0), &[0.625, 0.0, 0.375, 0.0, 0.0]);
        close(&of(1.0, 9, 1.0), &[0.5, 0.1, 0.3, 0.1, 0.0]);
        // Of equal logits the first one is kept.
        close(&of(1.0, 3, 1.0), &[0.5 / 0.9, 0.1 / 0.9, 0.3 / 0.9, 0.0, 0.0]);
        close(&of(1.0, 0, 0.7), &[0.625, 0.0, 0.375, 0.0, 0.0]);
        close(&of(1.0, 0, 0.3), &[1.0, 0.0, 0.0, 0.0, 0.0]);
        // A share of what `top_k` leaves: 0.625 of it is the first token.
        close(&of(1.0, 2, 0.6), &[1.0, 0.0, 0.0, 0.0, 0.0]);
        close(&of(0.0, 0, 1.0), &[1.0, 0.0, 0.0, 0.0, 0.0]);
        let greedy = GenerateOptions { temperature: 0.0, ..Default::default() };
        let mut greedy = Sampler::new(&greedy).unwrap();
        assert_eq!(greedy.draw(&[1.0, 3.0, 3.0]).unwrap(), 1);
    }

    #[test]
    fn draws_are_those_of_the_seed() {
        let of = |seed| {
            let options = GenerateOptions { seed, ..Default::default() };
            let mut sampler = Sampler::new(&options).unwrap();
            (0..50).map(|_| sampler.draw(&logits()).unwrap()).collect::<Vec<_>>()
        };
        assert_eq!(of(1), of(1));
        assert_ne!(of(1), of(2));
    }

    #[test]
    fn impossible_options_and_logits_are_errors() {
        for temperature in [-1.0, f64::NAN, f64::INFINITY] {
            let options = GenerateOptions { temperature, ..Default::default() };
            assert!(Sampler::new(&options).is_err(), "{temperature}");
        }
        for top_p in [0.0, -1.0, 1.1, f64::NAN] {
            let options = GenerateOptions { top_p, ..Default::default() };
            assert!(Sampler::new(&options).is_err(), "{top_p}");
        }
        let options = GenerateOptions::default();
        let mut sampler = Sampler::new(&options).unwrap();
        let never = f32::NEG_INFINITY;
        for logits in [&[0.0, f32::NAN][..], &[f32::INFINITY], &[never, never], &[]] {
            assert!(sampler.draw(logits).is_err(), "{logits:?}");
        }
        assert_eq!(sampler.draw(&[never, 0.0, never]).unwrap(), 1);
    }
}
