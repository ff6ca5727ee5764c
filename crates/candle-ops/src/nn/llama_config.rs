//! [`LlamaConfig`]: sizes of a Llama, as in Hugging Face's `config.json`.

use std::f64::consts::TAU;
use std::path::Path;

use candle_core::{DType, Device, Error, Result, Tensor, bail};
use serde::{Deserialize, Serialize};

use super::parameter::check_size;

/// Sizes of a [`Llama`](super::Llama), with the names of Hugging Face's `config.json`. The default
/// is that of transformers' `LlamaConfig`: Llama 1 with 7 billion parameters.
///
/// ```
/// use candle_ops::nn::LlamaConfig;
///
/// let config = LlamaConfig { num_key_value_heads: 8, ..LlamaConfig::default() };
/// assert_eq!((config.hidden_size, config.head_dim()), (4096, 128));
/// ```
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "Json", into = "Json")]
pub struct LlamaConfig {
    /// Number of tokens.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width between the projections of SwiGLU.
    pub intermediate_size: usize,
    /// Number of decoder layers.
    pub num_hidden_layers: usize,
    /// Number of query heads.
    pub num_attention_heads: usize,
    /// Number of key and value heads; divides that of query heads.
    pub num_key_value_heads: usize,
    /// Width of a head; `None` for `hidden_size / num_attention_heads`.
    pub head_dim: Option<usize>,
    /// Greatest number of tokens of a text.
    pub max_position_embeddings: usize,
    /// Number that is added to the mean square in RMS norms.
    pub rms_norm_eps: f64,
    /// Base of the angles of rotary embeddings.
    pub rope_theta: f64,
    /// Scaling of these angles for longer texts, as of Llama 3.1.
    pub rope_scaling: Option<Llama3RopeScaling>,
    /// Whether the head's weight is the embedding.
    pub tie_word_embeddings: bool,
    /// Whether projections of the attention have a bias.
    pub attention_bias: bool,
    /// Whether projections of SwiGLU have a bias.
    pub mlp_bias: bool,
}

/// Scaling of rotary angles of the type `llama3`: low frequencies are divided by `factor`, high
/// ones stay, those between are interpolated.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Llama3RopeScaling {
    /// Divisor of the low frequencies.
    pub factor: f64,
    /// Frequencies with fewer periods in the original context are low.
    pub low_freq_factor: f64,
    /// Frequencies with more periods in the original context are high.
    pub high_freq_factor: f64,
    /// Number of tokens of the original context.
    pub original_max_position_embeddings: usize,
}

impl Default for LlamaConfig {
    fn default() -> Self {
        Self {
            vocab_size: 32_000,
            hidden_size: 4096,
            intermediate_size: 11_008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: 32,
            head_dim: None,
            max_position_embeddings: 2048,
            rms_norm_eps: 1e-6,
            rope_theta: 10_000.0,
            rope_scaling: None,
            tie_word_embeddings: false,
            attention_bias: false,
            mlp_bias: false,
        }
    }
}

impl LlamaConfig {
    /// Reads a file `config.json`.
    ///
    /// # Errors
    ///
    /// A file that cannot be read or parsed; a model of another type; a variant that is not
    /// supported, by its key.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |why: &dyn std::fmt::Display| Error::msg(format!("{}: {why}", path.display()));
        let text = std::fs::read(path).map_err(|why| failed(&why))?;
        serde_json::from_slice(&text).map_err(|why| failed(&why))
    }

    /// Writes a file `config.json`, beside whose `model.safetensors` of
    /// [`VarMap::save`](super::VarMap::save) transformers' `from_pretrained` loads the model.
    ///
    /// # Errors
    ///
    /// A file that cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let text = serde_json::to_string_pretty(self).map_err(Error::wrap)?;
        let path = path.as_ref();
        std::fs::write(path, text).map_err(|why| Error::msg(format!("{}: {why}", path.display())))
    }

    /// Width of a head.
    #[must_use]
    pub fn head_dim(&self) -> usize {
        let heads = self.num_attention_heads.max(1);
        self.head_dim.unwrap_or(self.hidden_size / heads)
    }

    /// Returns an error for sizes that do not fit each other.
    pub(super) fn check(&self) -> Result<()> {
        let Self { num_attention_heads: heads, num_key_value_heads: kv_heads, .. } = *self;
        if heads.checked_rem(kv_heads) != Some(0) || heads == 0 {
            bail!("llama: {kv_heads} key heads do not divide {heads} query heads");
        }
        if self.head_dim.is_none() && !self.hidden_size.is_multiple_of(heads) {
            bail!("llama: {heads} heads do not divide the hidden size {}", self.hidden_size);
        }
        let depth = self.head_dim();
        if heads.checked_mul(depth).is_none() {
            bail!("llama: {heads} heads of a width of {depth} are too many");
        }
        if !self.rope_theta.is_finite() || self.rope_theta <= 0.0 {
            bail!("llama: rope_theta is {}, not positive and finite", self.rope_theta);
        }
        if depth == 0 || !depth.is_multiple_of(2) {
            bail!("llama: rotary embeddings need heads of an even width, got {depth}");
        }
        Ok(())
    }

    /// Cosines and sines of all positions, `[positions, head_dim / 2]`. Frequencies and angles are
    /// rounded to `f32`, as models are trained with those.
    pub(super) fn angles(&self, dtype: DType, device: &Device) -> Result<[Tensor; 2]> {
        let (depth, positions) = (self.head_dim(), self.max_position_embeddings);
        let shape = (2, positions, depth / 2).into();
        check_size("angles of max_position_embeddings", &shape, DType::F32, &Device::Cpu)?;
        let frequency = |pair: usize| {
            let power = (2 * pair) as f32 / depth as f32;
            self.scaled(1.0 / self.rope_theta.powf(power.into())) as f32
        };
        let frequencies: Vec<f32> = (0..depth / 2).map(frequency).collect();
        let angles = (0..positions).flat_map(|at| frequencies.iter().map(move |f| at as f32 * f));
        let angles: Vec<f32> = angles.collect();
        // Half precision would be too coarse.
        let dtype = if dtype == DType::F64 { dtype } else { DType::F32 };
        let table = |of: fn(f32) -> f32| {
            let values = angles.iter().copied().map(of).collect();
            Tensor::from_vec(values, (positions, depth / 2), device)?.to_dtype(dtype)
        };
        Ok([table(f32::cos)?, table(f32::sin)?])
    }

    fn scaled(&self, frequency: f64) -> f64 {
        let Some(scaling) = self.rope_scaling else { return frequency };
        let Llama3RopeScaling { factor, low_freq_factor: low, high_freq_factor: high, .. } =
            scaling;
        let periods = scaling.original_max_position_embeddings as f64 * frequency / TAU;
        let share = ((periods - low) / (high - low)).clamp(0.0, 1.0);
        (1.0 - share) * frequency / factor + share * frequency
    }
}

/// The keys of `config.json`. Others do not matter here.
#[derive(Clone, Serialize, Deserialize)]
struct Json {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    architectures: Option<Vec<String>>,
    #[serde(default)]
    model_type: Option<String>,
    #[serde(default)]
    hidden_act: Option<String>,
    vocab_size: usize,
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    #[serde(default)]
    num_key_value_heads: Option<usize>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    head_dim: Option<usize>,
    #[serde(default)]
    max_position_embeddings: Option<usize>,
    #[serde(default)]
    rms_norm_eps: Option<f64>,
    #[serde(default)]
    rope_theta: Option<f64>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_scaling: Option<Rope>,
    /// Both of them, since version 5 of transformers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_parameters: Option<Rope>,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(default)]
    attention_bias: bool,
    #[serde(default)]
    mlp_bias: bool,
    #[serde(default, skip_serializing)]
    quantization_config: Option<serde_json::Value>,
}

#[derive(Clone, Default, Serialize, Deserialize)]
struct Rope {
    #[serde(default)]
    rope_type: Option<String>,
    /// The old key; files may have both.
    #[serde(default, rename = "type", skip_serializing)]
    old_type: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rope_theta: Option<f64>,
    #[serde(default)]
    factor: Option<f64>,
    #[serde(default)]
    low_freq_factor: Option<f64>,
    #[serde(default)]
    high_freq_factor: Option<f64>,
    #[serde(default)]
    original_max_position_embeddings: Option<usize>,
}

impl Rope {
    fn scaling(&self) -> std::result::Result<Option<Llama3RopeScaling>, String> {
        match self.rope_type.as_ref().or(self.old_type.as_ref()).map(String::as_str) {
            None | Some("default") => return Ok(None),
            Some("llama3") => {}
            Some(other) => {
                return Err(format!(
                    "rotary embeddings of type `{other}` are not supported, only `llama3`"
                ));
            }
        }
        let missing = |key| format!("the scaling of rotary embeddings has no `{key}`");
        let original = "original_max_position_embeddings";
        let scaling = Llama3RopeScaling {
            factor: self.factor.ok_or_else(|| missing("factor"))?,
            low_freq_factor: self.low_freq_factor.ok_or_else(|| missing("low_freq_factor"))?,
            high_freq_factor: self.high_freq_factor.ok_or_else(|| missing("high_freq_factor"))?,
            original_max_position_embeddings: self
                .original_max_position_embeddings
                .ok_or_else(|| missing(original))?,
        };
        let fits = scaling.factor > 0.0 && scaling.high_freq_factor > scaling.low_freq_factor;
        if fits { Ok(Some(scaling)) } else { Err(format!("impossible factors: {scaling:?}")) }
    }
}

impl TryFrom<Json> for LlamaConfig {
    type Error = String;

    fn try_from(json: Json) -> std::result::Result<Self, String> {
        let expect = |key: &str, value: &Option<String>, expected: &str| match value.as_deref() {
            Some(other) if other != expected => {
                Err(format!("`{key}` is `{other}`, only `{expected}` is supported"))
            }
            _ => Ok(()),
        };
        expect("model_type", &json.model_type, "llama")?;
        expect("hidden_act", &json.hidden_act, "silu")?;
        if json.quantization_config.is_some() {
            return Err(
                "`quantization_config` is not supported: take a model that is not quantized".into(),
            );
        }
        let rope = json.rope_parameters.or(json.rope_scaling).unwrap_or_default();
        let default = Self::default();
        Ok(Self {
            vocab_size: json.vocab_size,
            hidden_size: json.hidden_size,
            intermediate_size: json.intermediate_size,
            num_hidden_layers: json.num_hidden_layers,
            num_attention_heads: json.num_attention_heads,
            num_key_value_heads: json.num_key_value_heads.unwrap_or(json.num_attention_heads),
            head_dim: json.head_dim,
            max_position_embeddings: json
                .max_position_embeddings
                .unwrap_or(default.max_position_embeddings),
            rms_norm_eps: json.rms_norm_eps.unwrap_or(default.rms_norm_eps),
            rope_theta: rope.rope_theta.or(json.rope_theta).unwrap_or(default.rope_theta),
            rope_scaling: rope.scaling()?,
            tie_word_embeddings: json.tie_word_embeddings,
            attention_bias: json.attention_bias,
            mlp_bias: json.mlp_bias,
        })
    }
}

impl From<LlamaConfig> for Json {
    fn from(config: LlamaConfig) -> Self {
        let scaling = |scaling: Llama3RopeScaling| Rope {
            rope_type: Some("llama3".to_owned()),
            old_type: None,
            rope_theta: None,
            factor: Some(scaling.factor),
            low_freq_factor: Some(scaling.low_freq_factor),
            high_freq_factor: Some(scaling.high_freq_factor),
            original_max_position_embeddings: Some(scaling.original_max_position_embeddings),
        };
        Self {
            architectures: Some(vec!["LlamaForCausalLM".to_owned()]),
            model_type: Some("llama".to_owned()),
            hidden_act: Some("silu".to_owned()),
            vocab_size: config.vocab_size,
            hidden_size: config.hidden_size,
            intermediate_size: config.intermediate_size,
            num_hidden_layers: config.num_hidden_layers,
            num_attention_heads: config.num_attention_heads,
            num_key_value_heads: Some(config.num_key_value_heads),
            head_dim: config.head_dim,
            max_position_embeddings: Some(config.max_position_embeddings),
            rms_norm_eps: Some(config.rms_norm_eps),
            rope_theta: Some(config.rope_theta),
            rope_scaling: config.rope_scaling.map(scaling),
            rope_parameters: None,
            tie_word_embeddings: config.tie_word_embeddings,
            attention_bias: config.attention_bias,
            mlp_bias: config.mlp_bias,
            quantization_config: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(more: &str) -> std::result::Result<LlamaConfig, String> {
        let text = format!(
            r#"{{"vocab_size": 9, "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1,
                "num_attention_heads": 2, "torch_dtype": "bfloat16"{more}}}"#
        );
        serde_json::from_str(&text).map_err(|why| why.to_string())
    }

    #[test]
    fn absent_keys_have_transformers_defaults() {
        let config = parse("").unwrap();
        assert_eq!((config.num_key_value_heads, config.head_dim()), (2, 4));
        assert_eq!((config.rms_norm_eps, config.rope_theta), (1e-6, 1e4));
        let old = r#", "rope_theta": 5e5, "rope_scaling": {"type": "llama3", "factor": 32.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}"#;
        let new = r#", "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000, "factor": 32.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}"#;
        let old = parse(old).unwrap();
        assert_eq!(old, parse(new).unwrap());
        assert_eq!(old.rope_scaling.unwrap().factor, 32.0);
        let saved = serde_json::to_string(&old).unwrap();
        assert_eq!(serde_json::from_str::<LlamaConfig>(&saved).unwrap(), old);
        assert_eq!(parse(r#", "rope_scaling": null"#).unwrap(), parse("").unwrap());
    }

    #[test]
    fn variants_that_are_not_supported_are_named() {
        for (more, expected) in [
            (r#", "model_type": "gemma""#, "`model_type` is `gemma`, only `llama`"),
            (r#", "hidden_act": "gelu""#, "`hidden_act` is `gelu`"),
            (r#", "rope_scaling": {"type": "yarn", "factor": 2.0}"#, "type `yarn`"),
            (r#", "rope_scaling": {"type": "llama3", "factor": 2.0}"#, "no `low_freq_factor`"),
        ] {
            let error = parse(more).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let check = |config: LlamaConfig| config.check().unwrap_err().to_string();
        let small =
            LlamaConfig { hidden_size: 24, num_attention_heads: 4, ..LlamaConfig::default() };
        assert!(check(small.clone()).contains("32 key heads do not divide 4"));
        let small = LlamaConfig { num_key_value_heads: 2, ..small };
        small.check().unwrap();
        let message = check(LlamaConfig { hidden_size: 20, ..small.clone() });
        assert!(message.contains("even width, got 5"), "{message}");
        let message = check(LlamaConfig { hidden_size: 22, ..small });
        assert!(message.contains("4 heads do not divide the hidden size 22"), "{message}");
    }
}
