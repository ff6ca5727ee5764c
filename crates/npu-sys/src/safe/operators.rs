//! Operators on views, enqueued on a stream.

#![expect(unsafe_code, reason = "calls C")]

use std::sync::Arc;

use super::objects::{Dims, Lists, Number, Numbers, Tensor};
use super::view::width;
use super::{Buffer, Context, Stream, View, argument};
#[expect(unused_imports, reason = "for the documentation")]
use crate::Error;
use crate::sys::{Acl, AclDataType, AclScalar, AclTensor, AclTensorList, Nnop, Ops};
use crate::{Plan, Result, Soc};

/// CANN's operators, enqueued on one stream.
///
/// If the output is also an input, the in-place form of the operator is used. CANN checks shapes
/// and types; its rejection is [`Error::Status`]. Operators on empty tensors do nothing, since some
/// have no kernel for them.
#[derive(Clone, Debug)]
pub struct Operators {
    stream: Arc<Stream>,
    pub(super) nnop: &'static Nnop,
    ops: &'static Ops,
    soc: Soc,
}

impl Operators {
    /// Uses the operators of these tables on this stream.
    ///
    /// # Errors
    ///
    /// [`Error::Status`] if AscendCL does not return the chip's name.
    pub fn new(stream: Stream, nnop: &'static Nnop, ops: &'static Ops) -> Result<Self> {
        let soc = Soc::of(stream.context().acl())?;
        Ok(Self { stream: Arc::new(stream), nnop, ops, soc })
    }

    /// Uses the installed CANN's operators on a new stream of the device with this index.
    ///
    /// # Errors
    ///
    /// [`Error::Load`] without CANN; [`Error::Status`].
    pub fn open(device: usize) -> Result<Self> {
        let context = Context::new(Acl::global()?, device)?;
        Self::new(Stream::new(&context)?, Nnop::global()?, Ops::global()?)
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The stream's context.
    #[must_use]
    pub fn context(&self) -> &Context {
        self.stream.context()
    }

    /// The chip.
    #[must_use]
    pub const fn soc(&self) -> &Soc {
        &self.soc
    }

    /// Whether this CANN has an operator, by its C name. The chip may still lack a kernel for it.
    #[must_use]
    pub fn has(&self, operator: &str) -> bool {
        self.ops.has(operator)
    }

    /// Allocates a view with uninitialized elements.
    ///
    /// # Errors
    ///
    /// As [`Buffer::new`] and [`View::new`].
    pub fn alloc(&self, count: usize, dtype: AclDataType) -> Result<View> {
        let bytes = count.saturating_mul(width(dtype).unwrap_or(1));
        View::new(&Buffer::new(self.context(), bytes.max(1))?, 0, &[count], dtype)
    }

    /// Copies host bytes to a view.
    ///
    /// # Errors
    ///
    /// As [`Stream::upload`], and [`Error::Argument`] if the lengths differ.
    pub fn write(&self, to: &View, from: &[u8]) -> Result<()> {
        if from.len() != to.bytes() {
            return argument(format!(
                "cannot write {} bytes to a view of {}",
                from.len(),
                to.bytes()
            ));
        }
        self.stream.upload(&to.buffer, to.offset, from)
    }

    /// Copies a view to the host. Blocks until the stream is done.
    ///
    /// # Errors
    ///
    /// As [`Stream::download`].
    pub fn read(&self, from: &View) -> Result<Vec<u8>> {
        let mut bytes = vec![0; from.bytes()];
        self.stream.download(&from.buffer, from.offset, &mut bytes)?;
        Ok(bytes)
    }

    /// `out ← factor·x`.
    ///
    /// # Errors
    ///
    /// [`Error::Status`], [`Error::NoFunction`]; [`Error::Argument`] for a view of another context.
    pub fn muls(&self, out: &View, x: &View, factor: f32) -> Result<()> {
        self.run(&[out, x], &[factor], |ops, t, s| match out == x {
            // SAFETY: the tensors and scalars made by `run` live until the plan is enqueued.
            true => unsafe { ops.aclnnInplaceMuls(t[0], s[0]) },
            // SAFETY: as above.
            false => unsafe { ops.aclnnMuls(t[1], s[0], t[0]) },
        })
    }

    /// `out ← x + factor·y`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn add(&self, out: &View, x: &View, y: &View, factor: f32) -> Result<()> {
        self.run(&[out, x, y], &[factor], |ops, t, s| match out == x {
            // SAFETY: as in `muls`.
            true => unsafe { ops.aclnnInplaceAdd(t[0], t[2], s[0]) },
            // SAFETY: as in `muls`.
            false => unsafe { ops.aclnnAdd(t[1], t[2], s[0], t[0]) },
        })
    }

    /// `out ← x + number`, elementwise.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn adds(&self, out: &View, x: &View, number: f32) -> Result<()> {
        self.run(&[out, x], &[number, 1.0], |ops, t, s| match out == x {
            // SAFETY: as in `muls`.
            true => unsafe { ops.aclnnInplaceAdds(t[0], s[0], s[1]) },
            // SAFETY: as in `muls`.
            false => unsafe { ops.aclnnAdds(t[1], s[0], s[1], t[0]) },
        })
    }

    /// `out ← x + factor·a·b`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn addcmul(&self, out: &View, x: &View, [a, b]: [&View; 2], factor: f32) -> Result<()> {
        self.run(&[out, x, a, b], &[factor], |ops, t, s| match out == x {
            // SAFETY: as in `muls`.
            true => unsafe { ops.aclnnInplaceAddcmul(t[0], t[2], t[3], s[0]) },
            // SAFETY: as in `muls`.
            false => unsafe { ops.aclnnAddcmul(t[1], t[2], t[3], s[0], t[0]) },
        })
    }

    /// `x ← x + factor·a/b`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn addcdiv(&self, x: &View, [a, b]: [&View; 2], factor: f32) -> Result<()> {
        self.run(&[x, a, b], &[factor], |ops, t, s| {
            // SAFETY: as in `muls`.
            unsafe { ops.aclnnInplaceAddcdiv(t[0], t[1], t[2], s[0]) }
        })
    }

    /// `out ← √x`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn sqrt(&self, out: &View, x: &View) -> Result<()> {
        self.run(&[out, x], &[], |ops, t, _| match out == x {
            // SAFETY: as in `muls`.
            true => unsafe { ops.aclnnInplaceSqrt(t[0]) },
            // SAFETY: as in `muls`.
            false => unsafe { ops.aclnnSqrt(t[1], t[0]) },
        })
    }

    /// `x ← x/divisor`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn divs(&self, x: &View, divisor: f32) -> Result<()> {
        self.run(&[x], &[divisor], |ops, t, s| {
            // SAFETY: as in `muls`.
            unsafe { ops.aclnnInplaceDivs(t[0], s[0]) }
        })
    }

    /// `out ← a/b`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn div(&self, out: &View, a: &View, b: &View) -> Result<()> {
        self.run(&[out, a, b], &[], |ops, t, _| match out == a {
            // SAFETY: as in `muls`.
            true => unsafe { ops.aclnnInplaceDiv(t[0], t[2]) },
            // SAFETY: as in `muls`.
            false => unsafe { ops.aclnnDiv(t[1], t[2], t[0]) },
        })
    }

    /// `out ← a·b`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn mul(&self, out: &View, a: &View, b: &View) -> Result<()> {
        self.run(&[out, a, b], &[], |ops, t, _| match out == a {
            // SAFETY: as in `muls`.
            true => unsafe { ops.aclnnInplaceMul(t[0], t[2]) },
            // SAFETY: as in `muls`.
            false => unsafe { ops.aclnnMul(t[1], t[2], t[0]) },
        })
    }

    /// `out ← max(a, b)`; NaN if `a` or `b` is NaN.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn maximum(&self, out: &View, a: &View, b: &View) -> Result<()> {
        self.run(&[out, a, b], &[], |ops, t, _| {
            // SAFETY: as in `muls`.
            unsafe { ops.aclnnMaximum(t[1], t[2], t[0]) }
        })
    }

    /// `to ← from`, cast to the type of `to`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn cast(&self, to: &View, from: &View) -> Result<()> {
        self.run(&[to, from], &[], |ops, t, _| {
            // SAFETY: as in `muls`.
            unsafe { ops.aclnnCast(t[1], to.dtype, t[0]) }
        })
    }

    /// `to ← from`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn copy(&self, to: &View, from: &View) -> Result<()> {
        self.run(&[to, from], &[], |ops, t, _| {
            // SAFETY: as in `muls`.
            unsafe { ops.aclnnInplaceCopy(t[0], t[1]) }
        })
    }

    /// `x ← 0`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn zero(&self, x: &View) -> Result<()> {
        self.run(&[x], &[], |ops, t, _| {
            // SAFETY: as in `muls`.
            unsafe { ops.aclnnInplaceZero(t[0]) }
        })
    }

    /// `x ← value`.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls).
    pub fn fill(&self, x: &View, value: f32) -> Result<()> {
        self.run(&[x], &[value], |ops, t, s| {
            // SAFETY: as in `muls`.
            unsafe { ops.aclnnInplaceFillScalar(t[0], s[0]) }
        })
    }

    /// `out[i] ← sum of row i of x`; `x` has `out.count()` rows. Both have the same type.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls), and [`Error::Argument`] if `x` cannot be divided into such rows.
    pub fn row_sums(&self, out: &View, x: &View) -> Result<()> {
        let rows = out.count();
        if rows == 0 || !x.count().is_multiple_of(rows) {
            return argument(format!("cannot divide {} elements into {rows} rows", x.count()));
        }
        let (x, out) = (x.shaped(&[rows, x.count() / rows])?, out.shaped(&[rows])?);
        let over = [1];
        let dims = Dims::new(self, &over)?;
        self.run(&[&out, &x], &[], |ops, t, _| {
            // SAFETY: as in `muls`; the array lives as long.
            unsafe { ops.aclnnReduceSum(t[1], dims.raw, false, out.dtype, t[0]) }
        })
    }

    /// `out[i] ← ‖x[i]‖₂`, for at most [`MAX_NORMS`](Self::MAX_NORMS) tensors; not on chips of the
    /// first generation.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls), and [`Error::Argument`] if the lists have different lengths.
    pub fn foreach_norm(&self, out: &[View], x: &[View]) -> Result<()> {
        let order = Number::new(self.nnop, 2.0)?;
        self.run_lists([Some(out), Some(x)], |ops, [out, x]| {
            // SAFETY: the lists made by `run_lists` live until the plan is enqueued.
            unsafe { ops.aclnnForeachNorm(x, order.raw, out) }
        })
    }

    /// `x[i] ← factors[i]·x[i]`, for at most [`MAX_LIST`](Self::MAX_LIST) tensors; not on chips of
    /// the first generation.
    ///
    /// # Errors
    ///
    /// As [`foreach_norm`](Self::foreach_norm).
    pub fn foreach_muls(&self, x: &[View], factors: &[f32]) -> Result<()> {
        if x.len() != factors.len() {
            return argument(format!("{} tensors have {} factors", x.len(), factors.len()));
        }
        if x.is_empty() {
            return Ok(());
        }
        let factors = Numbers::new(self, factors)?;
        self.run_lists([Some(x)], |ops, [x]| {
            // SAFETY: as above; the list of scalars lives as long.
            unsafe { ops.aclnnForeachMulScalarList(x, factors.raw, x) }
        })
    }

    /// Multiplies all tensors by `inv_scale`, a scalar on the device, and sets the scalar
    /// `found_inf` to 1 if an element is infinite or NaN; otherwise `found_inf` is unchanged. At
    /// most [`MAX_NORMS`](Self::MAX_NORMS) tensors.
    ///
    /// # Errors
    ///
    /// As [`muls`](Self::muls); CANN 8.1 does not declare it.
    pub fn non_finite_check_and_unscale(
        &self,
        x: &[View],
        found_inf: &View,
        inv_scale: &View,
    ) -> Result<()> {
        if x.is_empty() {
            return Ok(());
        }
        let (found, scale) = (Tensor::new(self, found_inf)?, Tensor::new(self, inv_scale)?);
        let ends = [found_inf.buffer.clone(), inv_scale.buffer.clone()];
        let lists = Lists::new(self, [Some(x)])?;
        let plan = {
            let _entered = self.context().enter()?;
            let [x] = lists.raw;
            // SAFETY: the list and both tensors live until the plan is enqueued.
            unsafe { self.ops.aclnnForeachNonFiniteCheckAndUnscale(x, found.raw, scale.raw) }
        }?;
        // SAFETY: the argument owns all tensors' memory, which belongs to this stream's context.
        unsafe { self.stream.launch(plan, Box::new((lists.buffers.clone(), ends))) }
    }

    /// Maximum number of tensors in a list.
    pub const MAX_LIST: usize = 50;
    /// Maximum number of tensors in a list for norms and for unscaling.
    pub const MAX_NORMS: usize = 250;

    /// Plans an operator with tensors of `views` and `scalars`, and enqueues it.
    pub(super) fn run(
        &self,
        views: &[&View],
        scalars: &[f32],
        plan: impl FnOnce(&Ops, &[*mut AclTensor], &[*mut AclScalar]) -> Result<Plan>,
    ) -> Result<()> {
        if views[0].count() == 0 {
            return Ok(());
        }
        let tensors: Vec<Tensor<'_>> =
            views.iter().map(|view| Tensor::new(self, view)).collect::<Result<_>>()?;
        let numbers: Vec<Number<'_>> =
            scalars.iter().map(|number| Number::new(self.nnop, *number)).collect::<Result<_>>()?;
        let raw: Vec<_> = tensors.iter().map(|tensor| tensor.raw).collect();
        let scalars: Vec<_> = numbers.iter().map(|number| number.raw).collect();
        let plan = {
            let _entered = self.context().enter()?;
            plan(self.ops, &raw, &scalars)
        }?;
        let keep: Vec<Buffer> = views.iter().map(|view| view.buffer.clone()).collect();
        // SAFETY: the plan's tensors are these views in buffers that `keep` owns and that belong to
        // this stream's context, as `Tensor::new` checks.
        unsafe { self.stream.launch(plan, Box::new(keep)) }
    }

    /// As [`run`](Self::run), for an operator on lists of equal length, or `None` for one that is
    /// left out.
    pub(super) fn run_lists<const N: usize>(
        &self,
        views: [Option<&[View]>; N],
        plan: impl FnOnce(&Ops, [*mut AclTensorList; N]) -> Result<Plan>,
    ) -> Result<()> {
        let lens: Vec<usize> = views.iter().flatten().map(|views| views.len()).collect();
        if lens.iter().any(|len| *len != lens[0]) {
            return argument(format!("an operator's lists have different lengths: {lens:?}"));
        }
        if lens[0] == 0 {
            return Ok(());
        }
        let lists = Lists::new(self, views)?;
        let plan = {
            let _entered = self.context().enter()?;
            plan(self.ops, lists.raw)
        }?;
        // SAFETY: as in `run`.
        unsafe { self.stream.launch(plan, Box::new(lists.buffers.clone())) }
    }
}

impl Operators {
    /// Returns whether an overflow occurred since the flag was last cleared. Blocks until the
    /// stream is done. Only chips whose f16 saturates have the flag.
    ///
    /// # Errors
    ///
    /// [`Error::Status`], [`Error::NoFunction`].
    pub fn overflowed(&self) -> Result<bool> {
        const BYTES: usize = 64;
        let status = Buffer::new(self.context(), BYTES)?;
        self.stream.fill(&status, 0, BYTES, 0)?;
        self.stream.enqueue(Box::new(status.clone()), |acl, raw| {
            // SAFETY: acl_rt.h, `aclrtGetOverflowStatus`: 64 bytes of device memory, which the
            // stream keeps alive.
            unsafe { acl.aclrtGetOverflowStatus(status.address(), BYTES, raw) }
        })?;
        let mut bytes = [0; BYTES];
        self.stream.download(&status, 0, &mut bytes)?;
        Ok(bytes.iter().any(|byte| *byte != 0))
    }

    /// Clears the overflow flag; enqueued on the stream.
    ///
    /// # Errors
    ///
    /// As [`overflowed`](Self::overflowed).
    pub fn clear_overflow(&self) -> Result<()> {
        self.stream.enqueue(Box::new(()), |acl, raw| {
            // SAFETY: acl_rt.h, `aclrtResetOverflowStatus`: a stream of the current context.
            unsafe { acl.aclrtResetOverflowStatus(raw) }
        })
    }
}
