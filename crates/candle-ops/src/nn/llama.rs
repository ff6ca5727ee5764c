//! [`Llama`]: a decoder-only language model, with the names of Hugging Face's `LlamaForCausalLM`.

use candle_core::{DType, Device, Module, Result, Tensor, bail};
use candle_nn::{Init, VarBuilder};

use super::generate::{GenerateOptions, Sampler};
use super::layer_norm::{RmsNorm, rms_norm};
use super::linear::{Linear, linear_init};
use super::llama_config::LlamaConfig;
use super::parameter::parameter;
use super::{Embedding, indices};
use crate::{SdpaOptions, add, rope_thd, scaled_dot_product_attention_thd, swiglu};

/// A decoder-only language model: RMS norms, rotary embeddings, grouped queries, SwiGLU.
///
/// Parameters have the names and shapes of transformers' `LlamaForCausalLM`
/// (`model.layers.0.self_attn.q_proj.weight`), so [`pretrained`](super::pretrained()) and
/// [`VarMap::load`](super::VarMap::load) read its files, and it reads those of
/// [`VarMap::save`](super::VarMap::save). New weights and embeddings are drawn from a normal
/// distribution with a deviation of 0.02, as there.
///
/// ```
/// use candle_core::{DType, Device, Module, Tensor};
/// use candle_ops::cross_entropy;
/// use candle_ops::nn::{GenerateOptions, Llama, LlamaConfig, VarMap, seeded};
///
/// let config = LlamaConfig {
///     vocab_size: 32,
///     hidden_size: 16,
///     intermediate_size: 40,
///     num_hidden_layers: 2,
///     num_attention_heads: 4,
///     num_key_value_heads: 2,
///     ..LlamaConfig::default()
/// };
/// let vars = VarMap::new();
/// let net = Llama::new(&config, seeded(&vars, 0, DType::F32, &Device::Cpu))?;
/// let tokens = Tensor::new(&[[3_u32, 1, 4, 1, 5]], &Device::Cpu)?;
/// let next = Tensor::new(&[1_u32, 4, 1, 5, 9], &Device::Cpu)?;
/// let loss = cross_entropy(&net.forward(&tokens)?.flatten_to(1)?, &next)?;
/// assert!(loss.backward()?.get(&vars.all_vars()[0]).is_some());
///
/// let options = GenerateOptions { max_new_tokens: 4, temperature: 0.8, ..Default::default() };
/// assert_eq!(net.generate(&[3, 1, 4], &options)?.len(), 4);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Llama {
    embed_tokens: Embedding,
    layers: Vec<Layer>,
    norm: RmsNorm,
    lm_head: Linear,
    /// Cosines and sines.
    angles: [Tensor; 2],
    config: LlamaConfig,
}

/// Keys and values of the tokens that a [`Llama`] has read: see [`Llama::forward_cached`].
#[derive(Clone, Debug, Default)]
pub struct LlamaCache {
    /// Of each layer, `[batch, tokens, heads, head_dim]`.
    layers: Vec<[Tensor; 2]>,
    len: usize,
}

impl LlamaCache {
    /// Number of tokens of each text so far.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// True before the first token.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Llama {
    /// Builds the model.
    ///
    /// # Errors
    ///
    /// Sizes that do not fit each other; errors of the builder; a parameter larger than the memory.
    pub fn new(config: &LlamaConfig, vb: VarBuilder<'_>) -> Result<Self> {
        config.check()?;
        let angles = config.angles(vb.dtype(), vb.device())?;
        let (model, width, vocab_size) = (vb.pp("model"), config.hidden_size, config.vocab_size);
        let embeddings =
            parameter((vocab_size, width), "weight", SMALL, &model.pp("embed_tokens"))?;
        let lm_head = match config.tie_word_embeddings {
            true => Linear::new(embeddings.clone(), None),
            false => linear_init(width, vocab_size, false, [SMALL, ZERO], vb.pp("lm_head"))?,
        };
        let layers = (0..config.num_hidden_layers)
            .map(|layer| Layer::new(config, model.pp("layers").pp(layer)));
        Ok(Self {
            embed_tokens: Embedding::new(embeddings, width),
            layers: layers.collect::<Result<_>>()?,
            norm: rms_norm(width, config.rms_norm_eps, model.pp("norm"))?,
            lm_head,
            angles,
            config: config.clone(),
        })
    }

    /// The sizes.
    pub const fn config(&self) -> &LlamaConfig {
        &self.config
    }

    /// Logits of the tokens after those in `tokens`, `[batch, count]`, which go on with the texts
    /// of the cache: `[batch, count, vocab_size]`, as [`forward`](Module::forward) computes for
    /// whole texts. Only the new tokens pass through the layers. For evaluation: the cached keys
    /// and values have no gradient.
    ///
    /// # Errors
    ///
    /// Those of `forward`, which leave the cache as it was; another batch than that of the cache; a
    /// cache of a model with another number of layers.
    pub fn forward_cached(&self, tokens: &Tensor, cache: &mut LlamaCache) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(tokens, Some(cache))?)
    }

    /// Goes on with a text of one token or more. Returns the new tokens: at most
    /// `max_new_tokens`, up to a stop token or the model's greatest number of positions.
    ///
    /// Calls the model once for the prompt and once for each token, with a [`LlamaCache`]. Call it
    /// in an evaluation (`Trainer::evaluate`, [`Context::evaluate`](crate::Context::evaluate)).
    ///
    /// # Errors
    ///
    /// Options out of range; a prompt that is empty or longer than the model's positions; a token
    /// out of range; logits that are NaN or positive infinity.
    pub fn generate(&self, prompt: &[u32], options: &GenerateOptions) -> Result<Vec<u32>> {
        let mut sampler = Sampler::new(options)?;
        if prompt.is_empty() {
            bail!("generate: the prompt has no token");
        }
        let (mut cache, mut unread, mut text) =
            (LlamaCache::default(), prompt.to_vec(), Vec::new());
        while text.len() < options.max_new_tokens {
            let device = self.embed_tokens.embeddings().device();
            let tokens = Tensor::new(unread.as_slice(), device)?.unsqueeze(0)?;
            let x = self.hidden(&tokens, Some(&mut cache))?;
            let last = x.narrow(1, unread.len() - 1, 1)?;
            let logits = self.lm_head.forward(&last)?.flatten_all()?.to_dtype(DType::F32)?;
            let token = sampler.draw(&logits.to_vec1::<f32>()?)?;
            if options.stop_tokens.contains(&token) {
                break;
            }
            text.push(token);
            if cache.len == self.config.max_position_embeddings {
                break;
            }
            unread = vec![token];
        }
        Ok(text)
    }

    /// The input of the head.
    fn hidden(&self, tokens: &Tensor, cache: Option<&mut LlamaCache>) -> Result<Tensor> {
        let (_, count) = tokens.dims2()?;
        let start = cache.as_ref().map_or(0, |cache| cache.len);
        let most = self.config.max_position_embeddings;
        if start + count > most {
            bail!("llama: {} tokens are more than max_position_embeddings, {most}", start + count);
        }
        let cached = cache.as_ref().map_or(0, |cache| cache.layers.len());
        if cached != 0 && cached != self.layers.len() {
            bail!("llama: a cache of {cached} layers for a model of {}", self.layers.len());
        }
        let [cos, sin] = &self.angles;
        let positions = Positions {
            cos: cos.narrow(0, start, count)?,
            sin: sin.narrow(0, start, count)?,
            mask: later_hidden(start, count, tokens.device())?,
        };
        let mut x = self.embed_tokens.forward(&indices(tokens)?)?;
        let Some(cache) = cache else {
            for layer in &self.layers {
                (x, _) = layer.forward(&x, &positions, None)?;
            }
            return self.norm.forward(&x);
        };
        let mut layers = Vec::with_capacity(self.layers.len());
        for (index, layer) in self.layers.iter().enumerate() {
            let past = cache.layers.get(index);
            let (y, keys_values) = layer.forward(&x, &positions, past)?;
            let [k, v] = keys_values;
            layers.push([k.detach(), v.detach()]);
            // The graph of a text ends here, or each token's would keep those before it.
            x = y.detach();
        }
        *cache = LlamaCache { layers, len: start + count };
        self.norm.forward(&x)
    }
}

impl Module for Llama {
    /// Logits of the next token at each position of `[batch, count]`:
    /// `[batch, count, vocab_size]`.
    fn forward(&self, tokens: &Tensor) -> Result<Tensor> {
        self.lm_head.forward(&self.hidden(tokens, None)?)
    }
}

/// The positions of the tokens of a pass.
struct Positions {
    cos: Tensor,
    sin: Tensor,
    /// The keys that queries attend to, if it is neither the causal mask nor all of them.
    mask: Option<Tensor>,
}

/// A mask for `count` queries after `start` other tokens: query `i` attends to keys `0..=start +
/// i`.
fn later_hidden(start: usize, count: usize, device: &Device) -> Result<Option<Tensor>> {
    if start == 0 || count <= 1 {
        return Ok(None);
    }
    let keys = start + count;
    let seen = (0..count).flat_map(|i| (0..keys).map(move |j| u8::from(j <= start + i)));
    Ok(Some(Tensor::from_iter(seen, device)?.reshape((count, keys))?))
}

/// A decoder layer.
#[derive(Clone, Debug)]
struct Layer {
    input_layernorm: RmsNorm,
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    post_attention_layernorm: RmsNorm,
    gate_proj: Linear,
    up_proj: Linear,
    down_proj: Linear,
    head_dim: usize,
}

impl Layer {
    fn new(config: &LlamaConfig, vb: VarBuilder<'_>) -> Result<Self> {
        let (attention, mlp) = (vb.pp("self_attn"), vb.pp("mlp"));
        let (width, inner) = (config.hidden_size, config.intermediate_size);
        let head_dim = config.head_dim();
        let (queries, keys) =
            (config.num_attention_heads * head_dim, config.num_key_value_heads * head_dim);
        let norm = |name| rms_norm(width, config.rms_norm_eps, vb.pp(name));
        let attend = |inputs, outputs, name| {
            let vb = attention.pp(name);
            linear_init(inputs, outputs, config.attention_bias, [SMALL, ZERO], vb)
        };
        let feed = |inputs, outputs, name| {
            linear_init(inputs, outputs, config.mlp_bias, [SMALL, ZERO], mlp.pp(name))
        };
        Ok(Self {
            input_layernorm: norm("input_layernorm")?,
            q_proj: attend(width, queries, "q_proj")?,
            k_proj: attend(width, keys, "k_proj")?,
            v_proj: attend(width, keys, "v_proj")?,
            o_proj: attend(queries, width, "o_proj")?,
            post_attention_layernorm: norm("post_attention_layernorm")?,
            gate_proj: feed(width, inner, "gate_proj")?,
            up_proj: feed(width, inner, "up_proj")?,
            down_proj: feed(inner, width, "down_proj")?,
            head_dim,
        })
    }

    /// Returns the result, and the keys and values of all tokens.
    fn forward(
        &self,
        x: &Tensor,
        positions: &Positions,
        past: Option<&[Tensor; 2]>,
    ) -> Result<(Tensor, [Tensor; 2])> {
        let (attended, keys_values) =
            self.attend(&self.input_layernorm.forward(x)?, positions, past)?;
        let x = add(x, &attended)?;
        let y = self.post_attention_layernorm.forward(&x)?;
        let inner = swiglu(&self.gate_proj.forward(&y)?, &self.up_proj.forward(&y)?)?;
        Ok((add(&x, &self.down_proj.forward(&inner)?)?, keys_values))
    }

    fn attend(
        &self,
        x: &Tensor,
        positions: &Positions,
        past: Option<&[Tensor; 2]>,
    ) -> Result<(Tensor, [Tensor; 2])> {
        let (batch, count, _) = x.dims3()?;
        let heads = |y: Tensor| y.reshape((batch, count, (), self.head_dim));
        let turn = |y: Tensor| rope_thd(&heads(y)?, &positions.cos, &positions.sin);
        let q = turn(self.q_proj.forward(x)?)?;
        let k = turn(self.k_proj.forward(x)?)?;
        let v = heads(self.v_proj.forward(x)?)?;
        let (k, v) = match past {
            Some([keys, values]) => (Tensor::cat(&[keys, &k], 1)?, Tensor::cat(&[values, &v], 1)?),
            None => (k, v),
        };
        let mask = positions.mask.as_ref();
        let options = SdpaOptions { mask, causal: past.is_none(), ..Default::default() };
        let y = scaled_dot_product_attention_thd(&q, &k, &v, options)?;
        Ok((self.o_proj.forward(&y.reshape((batch, count, ()))?)?, [k, v]))
    }
}

const SMALL: Init = Init::Randn { mean: 0.0, stdev: 0.02 };
const ZERO: Init = Init::Const(0.0);
