//! Arguments of CANN's operators, created for one call: tensors, scalars, and lists of them.

#![expect(unsafe_code, reason = "calls C")]

use std::ffi::c_void;
use std::ptr;

use super::{Buffer, Operators, View, argument, dropped};
use crate::Result;
use crate::sys::{
    AclDataType, AclFormat, AclIntArray, AclScalar, AclScalarList, AclTensor, AclTensorList, Nnop,
};

/// Declares a C object that is destroyed when dropped.
macro_rules! object {
    ($(#[$doc:meta])* $vis:vis $name:ident, $c:ident, $destroy:ident) => {
        $(#[$doc])*
        #[derive(Debug)]
        $vis struct $name<'a> {
            nnop: &'a Nnop,
            pub(super) raw: *mut $c,
        }

        impl Drop for $name<'_> {
            fn drop(&mut self) {
                // SAFETY: created by this type and destroyed once, after its operator was enqueued
                // or failed.
                dropped(unsafe { self.nnop.$destroy(self.raw) });
            }
        }
    };
}

object!(
    /// A tensor, the argument of one call.
    pub Tensor, AclTensor, aclDestroyTensor
);
object!(
    /// A number, the argument of one call.
    pub Number, AclScalar, aclDestroyScalar
);
object!(pub(super) Dims, AclIntArray, aclDestroyIntArray);
object!(pub(super) Numbers, AclScalarList, aclDestroyScalarList);

impl<'a> Tensor<'a> {
    pub(super) fn new(of: &'a Operators, view: &View) -> Result<Self> {
        if *view.buffer.context() != *of.context() {
            return argument("the view belongs to another context than the operators");
        }
        let _entered = of.context().enter()?;
        let dims: Vec<i64> = view.dims.iter().map(|dim| *dim as i64).collect();
        let address = view.buffer.address().wrapping_byte_add(view.offset);
        let (rank, at, nd) = (dims.len() as u64, dims.as_ptr(), AclFormat::ND);
        // SAFETY: acl_meta.h, `aclCreateTensor`: reads `rank` dimensions before it returns; null
        // strides mean a contiguous tensor; the address is aligned, as `View::new` checks.
        let raw = unsafe {
            of.nnop.aclCreateTensor(at, rank, view.dtype, ptr::null(), 0, nd, at, rank, address)
        }?;
        Ok(Self { nnop: of.nnop, raw })
    }

    /// A tensor of one dimension: `count` elements, of which the first is `offset` elements after
    /// `address`. A context must be current.
    ///
    /// # Errors
    ///
    /// [`Error::Status`](crate::Error::Status), for example if CANN requires another alignment of
    /// the address.
    ///
    /// # Safety
    ///
    /// The elements are device memory that is valid while operators run on the tensor.
    pub unsafe fn strided(
        nnop: &'a Nnop,
        address: *mut c_void,
        offset: usize,
        count: usize,
        dtype: AclDataType,
    ) -> Result<Self> {
        let (dims, storage) = ([count as i64], [(offset + count) as i64]);
        let (at, all, stride) = (dims.as_ptr(), storage.as_ptr(), [1_i64]);
        let (step, offset, nd) = (stride.as_ptr(), offset as i64, AclFormat::ND);
        // SAFETY: acl_meta.h, `aclCreateTensor`: reads one dimension, one stride and one storage
        // dimension before it returns.
        let raw = unsafe { nnop.aclCreateTensor(at, 1, dtype, step, offset, nd, all, 1, address) }?;
        Ok(Self { nnop, raw })
    }

    /// The raw handle, valid as long as `self`.
    #[must_use]
    pub const fn raw(&self) -> *mut AclTensor {
        self.raw
    }
}

impl<'a> Number<'a> {
    /// A number of type `float`.
    ///
    /// # Errors
    ///
    /// [`Error::Status`](crate::Error::Status).
    pub fn new(nnop: &'a Nnop, mut value: f32) -> Result<Self> {
        // SAFETY: acl_meta.h, `aclCreateScalar`: reads one `float`, a local.
        let raw = unsafe { nnop.aclCreateScalar((&raw mut value).cast(), AclDataType::FLOAT) }?;
        Ok(Self { nnop, raw })
    }

    /// The raw handle, valid as long as `self`.
    #[must_use]
    pub const fn raw(&self) -> *mut AclScalar {
        self.raw
    }
}

impl<'a> Dims<'a> {
    pub(super) fn new(of: &'a Operators, values: &[i64]) -> Result<Self> {
        // SAFETY: acl_meta.h, `aclCreateIntArray`: reads `values.len()` numbers before it returns.
        let raw = unsafe { of.nnop.aclCreateIntArray(values.as_ptr(), values.len() as u64) }?;
        Ok(Self { nnop: of.nnop, raw })
    }
}

impl<'a> Numbers<'a> {
    pub(super) fn new(of: &'a Operators, values: &[f32]) -> Result<Self> {
        let numbers: Vec<Number<'_>> =
            values.iter().map(|value| Number::new(of.nnop, *value)).collect::<Result<_>>()?;
        let all: Vec<_> = numbers.iter().map(|number| number.raw.cast_const()).collect();
        // SAFETY: acl_meta.h, `aclCreateScalarList`: takes ownership of `all.len()` scalars.
        let raw = unsafe { of.nnop.aclCreateScalarList(all.as_ptr(), all.len() as u64) }?;
        numbers.into_iter().for_each(std::mem::forget);
        Ok(Self { nnop: of.nnop, raw })
    }
}

/// Lists of tensors, which own them; null for `None`.
pub(super) struct Lists<'a, const N: usize> {
    of: &'a Operators,
    pub(super) raw: [*mut AclTensorList; N],
    pub(super) buffers: Vec<Buffer>,
}

impl<'a, const N: usize> Lists<'a, N> {
    /// Makes lists of views, which are not empty.
    pub(super) fn new(of: &'a Operators, views: [Option<&[View]>; N]) -> Result<Self> {
        let mut lists = Self { of, raw: [ptr::null_mut(); N], buffers: Vec::new() };
        for (raw, views) in lists.raw.iter_mut().zip(views) {
            let Some(views) = views else { continue };
            let tensors: Vec<Tensor<'_>> =
                views.iter().map(|view| Tensor::new(of, view)).collect::<Result<_>>()?;
            let all: Vec<_> = tensors.iter().map(|tensor| tensor.raw.cast_const()).collect();
            // SAFETY: acl_meta.h, `aclCreateTensorList`: takes ownership of `all.len()` tensors.
            *raw = unsafe { of.nnop.aclCreateTensorList(all.as_ptr(), all.len() as u64) }?;
            tensors.into_iter().for_each(std::mem::forget);
            lists.buffers.extend(views.iter().map(|view| view.buffer.clone()));
        }
        Ok(lists)
    }
}

impl<const N: usize> Drop for Lists<'_, N> {
    fn drop(&mut self) {
        for raw in self.raw.iter().filter(|raw| !raw.is_null()) {
            // SAFETY: created in `new`, destroyed once.
            dropped(unsafe { self.of.nnop.aclDestroyTensorList(*raw) });
        }
    }
}
