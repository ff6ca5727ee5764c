//! Arguments of CANN's operators, created for one call: tensors, scalars, and lists of them.

#![expect(unsafe_code, reason = "calls C")]

use std::ptr;

use super::{Buffer, Operators, View, argument, dropped};
use crate::Result;
use crate::sys::{
    AclDataType, AclFormat, AclIntArray, AclScalar, AclScalarList, AclTensor, AclTensorList,
};

/// Declares a C object that is destroyed when dropped.
macro_rules! object {
    ($name:ident, $c:ident, $destroy:ident) => {
        pub(super) struct $name<'a> {
            of: &'a Operators,
            pub(super) raw: *mut $c,
        }

        impl Drop for $name<'_> {
            fn drop(&mut self) {
                // SAFETY: created by this type's `new` and destroyed once, after its operator was enqueued or
                // failed.
                dropped(unsafe { self.of.nnop.$destroy(self.raw) });
            }
        }
    };
}

object!(Tensor, AclTensor, aclDestroyTensor);
object!(Number, AclScalar, aclDestroyScalar);
object!(Dims, AclIntArray, aclDestroyIntArray);
object!(Numbers, AclScalarList, aclDestroyScalarList);

impl<'a> Tensor<'a> {
    pub(super) fn new(of: &'a Operators, view: &View) -> Result<Self> {
        if *view.buffer.context() != *of.context() {
            return argument("the view belongs to another context than the operators");
        }
        let _entered = of.context().enter()?;
        let dims: Vec<i64> = view.dims.iter().map(|dim| *dim as i64).collect();
        let address = view.buffer.address().wrapping_byte_add(view.offset);
        let (rank, at, nd) = (dims.len() as u64, dims.as_ptr(), AclFormat::ND);
        // SAFETY: acl_meta.h, `aclCreateTensor`: reads `rank` dimensions before it returns; null strides
        // mean a contiguous tensor; the address is aligned, as `View::new` checks.
        let raw = unsafe {
            of.nnop.aclCreateTensor(at, rank, view.dtype, ptr::null(), 0, nd, at, rank, address)
        }?;
        Ok(Self { of, raw })
    }
}

impl<'a> Number<'a> {
    pub(super) fn new(of: &'a Operators, mut value: f32) -> Result<Self> {
        // SAFETY: acl_meta.h, `aclCreateScalar`: reads one `float`, a local.
        let raw = unsafe { of.nnop.aclCreateScalar((&raw mut value).cast(), AclDataType::FLOAT) }?;
        Ok(Self { of, raw })
    }
}

impl<'a> Dims<'a> {
    pub(super) fn new(of: &'a Operators, values: &[i64]) -> Result<Self> {
        // SAFETY: acl_meta.h, `aclCreateIntArray`: reads `values.len()` numbers before it returns.
        let raw = unsafe { of.nnop.aclCreateIntArray(values.as_ptr(), values.len() as u64) }?;
        Ok(Self { of, raw })
    }
}

impl<'a> Numbers<'a> {
    pub(super) fn new(of: &'a Operators, values: &[f32]) -> Result<Self> {
        let numbers: Vec<Number<'_>> =
            values.iter().map(|value| Number::new(of, *value)).collect::<Result<_>>()?;
        let all: Vec<_> = numbers.iter().map(|number| number.raw.cast_const()).collect();
        // SAFETY: acl_meta.h, `aclCreateScalarList`: takes ownership of `all.len()` scalars.
        let raw = unsafe { of.nnop.aclCreateScalarList(all.as_ptr(), all.len() as u64) }?;
        numbers.into_iter().for_each(std::mem::forget);
        Ok(Self { of, raw })
    }
}

/// Lists of tensors, which own them; null for an empty list.
pub(super) struct Lists<'a, const N: usize> {
    of: &'a Operators,
    pub(super) raw: [*mut AclTensorList; N],
    pub(super) buffers: Vec<Buffer>,
}

impl<'a, const N: usize> Lists<'a, N> {
    pub(super) fn new(of: &'a Operators, views: [&[View]; N]) -> Result<Self> {
        let mut lists = Self { of, raw: [ptr::null_mut(); N], buffers: Vec::new() };
        let some = lists.raw.iter_mut().zip(views).filter(|(_, views)| !views.is_empty());
        for (raw, views) in some {
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
