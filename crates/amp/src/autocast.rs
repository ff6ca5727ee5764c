//! Autocast: PyTorch's lists of the operators that run in half precision and those that must not.
//!
//! Matrix products and convolutions are faster in half precision and accumulate in f32;
//! exponentials, logarithms, norms and losses lose digits or overflow in it. A tensor engine looks
//! up each operator by name before it runs it. An operator in no list runs in the type of its
//! inputs.
//!
//! [`Autocast`] is a value; a nested region is another value. The lists of CUDA and the CPU differ:
//! the CPU's have no rule for `layer_norm` and `softmax`, for example. NPUs use CUDA's.
//!
//! Follows: the registrations of PyTorch 2.15, `aten/src/ATen/autocast_mode.cpp` and `.h`.

use std::borrow::Cow;
use std::collections::HashMap;
use std::sync::Arc;

use crate::{DType, Error, Result};

/// The rule for an operator, with PyTorch's names.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum CastRule {
    /// Inputs are cast to the lower precision.
    LowerPrecisionFp,
    /// Inputs are cast to f32.
    Fp32,
    /// Inputs are kept, and the `dtype` argument becomes f32 unless the caller set it.
    Fp32SetOptDtype,
    /// As `Fp32SetOptDtype`, for an overload without `dtype`.
    Fp32AppendDtype,
    /// Inputs are cast to the widest type among them.
    Promote,
    /// The operator is rejected, since it is unsafe in half precision.
    Banned,
}

/// How to run an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cast {
    /// Run it on its inputs as they are.
    Keep,
    /// Cast every floating-point input except f64 to this type.
    Inputs(DType),
    /// Keep the inputs; compute and return this type, unless the caller set another `dtype`.
    Output(DType),
}

impl Cast {
    /// The type to cast a floating-point input of type `input` to.
    #[must_use]
    pub const fn input(self, input: DType) -> DType {
        match (self, input) {
            (Self::Inputs(_), DType::F64) | (Self::Keep | Self::Output(_), _) => input,
            (Self::Inputs(dtype), _) => dtype,
        }
    }
}

/// The autocast rules for a region of a program. Cloning is cheap.
///
/// ```
/// use amp::{Autocast, Cast, CastRule, DType};
///
/// let autocast = Autocast::cuda().with_rule("my_gelu", CastRule::Fp32);
/// let inputs = [DType::F32, DType::F32];
/// assert_eq!(autocast.cast("linear", &inputs)?, Cast::Inputs(DType::F16));
/// assert_eq!(autocast.cast("my_gelu", &inputs[..1])?, Cast::Inputs(DType::F32));
/// assert_eq!(autocast.cast("relu", &[DType::F16])?, Cast::Keep);
///
/// let inner = autocast.clone().with_enabled(false); // a nested region in f32
/// assert_eq!(inner.cast("linear", &inputs)?, Cast::Keep);
/// # Ok::<(), amp::Error>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
pub struct Autocast {
    rules: Arc<HashMap<Cow<'static, str>, CastRule>>,
    dtype: DType,
    enabled: bool,
}

impl Autocast {
    /// CUDA's lists, with f16 as the lower precision.
    #[must_use]
    pub fn cuda() -> Self {
        Self { rules: rules(CUDA), dtype: DType::F16, enabled: true }
    }

    /// The CPU's lists, with bf16 as the lower precision.
    #[must_use]
    pub fn cpu() -> Self {
        Self { rules: rules(CPU), dtype: DType::Bf16, enabled: true }
    }

    /// Sets the lower precision to f16.
    #[must_use]
    pub fn with_f16(self) -> Self {
        Self { dtype: DType::F16, ..self }
    }

    /// Sets the lower precision to bf16.
    #[must_use]
    pub fn with_bf16(self) -> Self {
        Self { dtype: DType::Bf16, ..self }
    }

    /// Sets the lower precision, [`F16`](DType::F16) or [`Bf16`](DType::Bf16).
    ///
    /// # Errors
    ///
    /// [`Error::LowerPrecision`] for another type.
    pub fn with_dtype(self, dtype: DType) -> Result<Self> {
        match dtype {
            DType::F16 | DType::Bf16 => Ok(Self { dtype, ..self }),
            DType::F32 | DType::F64 => Err(Error::LowerPrecision { dtype }),
        }
    }

    /// Enables or disables autocast: disabled, every operator keeps its inputs and none is banned.
    #[must_use]
    pub fn with_enabled(self, enabled: bool) -> Self {
        Self { enabled, ..self }
    }

    /// Sets the rule for `op` and all its overloads (`op.*`).
    #[must_use]
    pub fn with_rule(mut self, op: &str, rule: CastRule) -> Self {
        let rules = Arc::make_mut(&mut self.rules);
        let overloads = rules.iter_mut().filter(|(name, _)| base(name) == op);
        overloads.for_each(|(_, old)| *old = rule);
        rules.insert(Cow::Owned(op.to_owned()), rule);
        self
    }

    /// Removes the rules for `op` and all its overloads: they keep their inputs.
    #[must_use]
    pub fn without_rule(mut self, op: &str) -> Self {
        Arc::make_mut(&mut self.rules).retain(|name, _| name != op && base(name) != op);
        self
    }

    /// Whether autocast is enabled.
    #[must_use]
    pub const fn is_enabled(&self) -> bool {
        self.enabled
    }

    /// The lower precision: f16 or bf16.
    #[must_use]
    pub const fn dtype(&self) -> DType {
        self.dtype
    }

    /// The rule for an operator by PyTorch's name, with its overload (`softmax.int`) or without
    /// (`softmax`); `None` if it is in no list. Ignores [`is_enabled`](Self::is_enabled).
    #[must_use]
    pub fn rule(&self, op: &str) -> Option<CastRule> {
        self.rules.get(op).copied()
    }

    /// All operators with their rules, in arbitrary order.
    pub fn rules(&self) -> impl Iterator<Item = (&str, CastRule)> {
        self.rules.iter().map(|(name, rule)| (&**name, *rule))
    }

    /// Returns how to run `op` on floating-point inputs of these types.
    ///
    /// An operator that [promotes](CastRule::Promote) casts f16 and bf16 together to f32; PyTorch
    /// rejects the one that is not its lower precision.
    ///
    /// # Errors
    ///
    /// [`Error::Banned`].
    pub fn cast(&self, op: &str, inputs: &[DType]) -> Result<Cast> {
        let Some(rule) = self.rule(op).filter(|_| self.enabled) else { return Ok(Cast::Keep) };
        Ok(match rule {
            CastRule::LowerPrecisionFp => Cast::Inputs(self.dtype),
            CastRule::Fp32 => Cast::Inputs(DType::F32),
            CastRule::Fp32SetOptDtype | CastRule::Fp32AppendDtype => match inputs.first() {
                None | Some(DType::F64) => Cast::Keep,
                Some(_) => Cast::Output(DType::F32),
            },
            CastRule::Promote => {
                let low = |input: &DType| [self.dtype, DType::F64].contains(input);
                Cast::Inputs(if inputs.iter().all(low) { self.dtype } else { DType::F32 })
            }
            CastRule::Banned => return Err(Error::Banned { op: op.to_owned() }),
        })
    }
}

/// The name without its overload.
fn base(name: &str) -> &str {
    name.split_once('.').map_or(name, |(base, _)| base)
}

/// Maps each listed name, and the same name without its overload, to its rule. All overloads of an
/// operator have the same rule.
fn rules(lists: &'static [(CastRule, &str)]) -> Arc<HashMap<Cow<'static, str>, CastRule>> {
    let names = lists.iter().flat_map(|(rule, names)| names.split(' ').map(|name| (name, *rule)));
    let both = names.flat_map(|(name, rule)| [(name, rule), (base(name), rule)]);
    Arc::new(both.map(|(name, rule)| (Cow::Borrowed(name), rule)).collect())
}

/// Operators by rule, separated by spaces.
const CUDA: &[(CastRule, &str)] = &[
    (
        CastRule::LowerPrecisionFp,
        "_convolution.deprecated _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d \
         conv_transpose2d.input conv_transpose3d.input convolution prelu addmm addmv addr matmul \
         einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul linalg_multi_dot \
         _thnn_fused_lstm_cell _thnn_fused_gru_cell lstm_cell gru_cell rnn_tanh_cell \
         rnn_relu_cell _scaled_dot_product_flash_attention scaled_dot_product_attention \
         cudnn_convolution cudnn_convolution_transpose",
    ),
    (
        CastRule::Fp32,
        "acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan \
         pow.Tensor_Scalar pow.Tensor_Tensor pow.Scalar softplus layer_norm native_layer_norm \
         rms_norm group_norm frobenius_norm.dim nuclear_norm nuclear_norm.dim cosine_similarity \
         poisson_nll_loss cosine_embedding_loss nll_loss nll_loss2d hinge_embedding_loss kl_div \
         l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss multilabel_margin_loss \
         soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits \
         dist pdist cdist renorm logsumexp upsample_nearest1d _upsample_nearest_exact1d \
         upsample_nearest2d _upsample_nearest_exact2d upsample_nearest3d \
         _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d _upsample_bilinear2d_aa \
         upsample_trilinear3d upsample_bicubic2d _upsample_bicubic2d_aa",
    ),
    (
        CastRule::Fp32SetOptDtype,
        "prod prod.dim_int softmax.int log_softmax.int cumprod cumsum linalg_vector_norm \
         linalg_matrix_norm linalg_matrix_norm.str_ord sum sum.dim_IntList",
    ),
    (CastRule::Fp32AppendDtype, "norm.Scalar norm.ScalarOpt_dim"),
    (
        CastRule::Promote,
        "addcdiv addcmul atan2 bilinear cross dot vdot grid_sampler index_put tensordot \
         scatter_add",
    ),
    (CastRule::Banned, "binary_cross_entropy"),
];

/// Operators by rule, separated by spaces.
const CPU: &[(CastRule, &str)] = &[
    (
        CastRule::LowerPrecisionFp,
        "_addmm_activation _convolution.deprecated _native_multi_head_attention addbmm addmm \
         baddbmm bmm conv1d conv1d.padding conv2d conv2d.padding conv3d conv3d.padding conv_tbc \
         conv_transpose1d conv_transpose2d.input conv_transpose3d.input linalg_vecdot linear \
         matmul mkldnn_rnn_layer mm prelu scaled_dot_product_attention",
    ),
    (
        CastRule::Fp32,
        "_grid_sampler_2d_cpu_fallback _lu_with_info adaptive_avg_pool3d adaptive_max_pool3d \
         avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky_inverse \
         cholesky_solve cosine_embedding_loss cross_entropy_loss ctc_loss.IntList ctc_loss.Tensor \
         fake_quantize_per_tensor_affine fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 \
         fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn \
         fractional_max_pool2d fractional_max_pool3d geqrf grid_sampler grid_sampler_2d \
         grid_sampler_3d hinge_embedding_loss huber_loss inverse kl_div l1_loss linalg_cholesky \
         linalg_cholesky_ex linalg_cond linalg_cond.p_str linalg_eig linalg_eigh linalg_eigvals \
         linalg_eigvalsh linalg_householder_product linalg_inv linalg_inv_ex linalg_lstsq \
         linalg_matrix_rank linalg_matrix_rank.atol_rtol_float \
         linalg_matrix_rank.atol_rtol_tensor linalg_matrix_rank.tol_tensor linalg_matrix_sqrth \
         linalg_qr linalg_solve linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve \
         lu_solve margin_ranking_loss max_pool3d max_unpool2d max_unpool3d mse_loss \
         multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward nanquantile \
         nanquantile.scalar nll_loss nll_loss2d orgqr ormqr pinverse poisson_nll_loss polar prod \
         prod.dim_int quantile quantile.scalar reflection_pad1d reflection_pad2d \
         replication_pad1d replication_pad2d replication_pad3d smooth_l1_loss soft_margin_loss \
         stft stft.center svd trace triangular_solve triplet_margin_loss view_as_complex",
    ),
    (CastRule::Promote, "cat index_copy stack"),
];
