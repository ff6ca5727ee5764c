//! The C functions: one per row of `npu-sys`' tables, each calling the function of its name here.
//!
//! A row without such a function, or of another type, does not compile.

#![expect(unsafe_code, reason = "exports functions under C's names")]

use std::ffi::{c_char, c_void};
use std::ptr::{self, NonNull};

use npu_sys::sys::*;

use crate::world::called;

/// The return type of a C function, made from the result of its implementation.
trait Answer {
    type Value;

    fn of(outcome: Result<Self::Value, i32>) -> Self;
}

macro_rules! codes {
    ($($status:ident,)*) => {$(
        impl Answer for $status {
            type Value = ();

            fn of(outcome: Result<(), i32>) -> Self {
                Self(outcome.err().unwrap_or_default())
            }
        }
    )*};
}

codes! { AclError, AclnnStatus, HcclResult, }

impl<T> Answer for *mut T {
    type Value = Self;

    fn of(outcome: Result<Self, i32>) -> Self {
        outcome.unwrap_or(ptr::null_mut())
    }
}

impl Answer for *const c_char {
    type Value = Self;

    fn of(outcome: Result<Self, i32>) -> Self {
        outcome.unwrap_or(ptr::null())
    }
}

impl Answer for u32 {
    type Value = Self;

    fn of(outcome: Result<Self, i32>) -> Self {
        outcome.unwrap_or_default()
    }
}

/// Counts the call, and fails it if that was asked for.
fn answer<A: Answer>(function: &'static str, body: impl FnOnce() -> Result<A::Value, i32>) -> A {
    A::of(called(function).map_or_else(body, Err))
}

macro_rules! export {
    (
        $(#[$meta:meta])*
        $table:ident = $libraries:ident
        required { $(fn $f:ident($($a:ident: $t:ty),* $(,)?) -> $r:ty;)* }
        optional { $(fn $of:ident($($oa:ident: $ot:ty),* $(,)?) -> $or:ty;)* }
    ) => {
        export!(@each $(fn $f($($a: $t),*) -> $r;)* $(fn $of($($oa: $ot),*) -> $or;)*);
    };
    (@each $(fn $f:ident($($a:ident: $t:ty),*) -> $r:ty;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $f($($a: $t),*) -> $r {
                answer(stringify!($f), || implemented::$f($($a),*))
            }
        )*

        fn find(name: &str) -> Option<*mut c_void> {
            match name {
                $(stringify!($f) => {
                    let function: unsafe extern "C" fn($($t),*) -> $r = $f;
                    Some(function as *mut c_void)
                })*
                _ => None,
            }
        }
    };
}

macro_rules! export_ops {
    (
        $(#[$meta:meta])*
        $table:ident = $libraries:ident {
            $(fn $run:ident, $plan:ident($($a:ident: $t:ty),* $(,)?) $(in $since:tt)?;)*
        }
    ) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $plan(
                $($a: $t,)* workspace_bytes: *mut u64, executor: *mut *mut AclOpExecutor
            ) -> AclnnStatus {
                answer(stringify!($plan), || {
                    let kernel = implemented::$run($($a),*)?;
                    implemented::planned(stringify!($run), kernel, workspace_bytes, executor)
                })
            }

            #[unsafe(no_mangle)]
            unsafe extern "C" fn $run(
                workspace: *mut c_void, bytes: u64, executor: *mut AclOpExecutor, stream: AclrtStream
            ) -> AclnnStatus {
                answer(stringify!($run), || {
                    implemented::run(stringify!($run), workspace, bytes, executor, stream)
                })
            }
        )*

        fn find(name: &str) -> Option<*mut c_void> {
            match name {
                $(
                    stringify!($plan) => {
                        let function: unsafe extern "C" fn(
                            $($t,)* *mut u64, *mut *mut AclOpExecutor
                        ) -> AclnnStatus = $plan;
                        Some(function as *mut c_void)
                    }
                    stringify!($run) => {
                        let function: Run = $run;
                        Some(function as *mut c_void)
                    }
                )*
                _ => None,
            }
        }
    };
}

/// A family of functions: where they are implemented, how they are exported.
macro_rules! family {
    ($module:ident, $list:ident, $export:ident, $table:ident, $rust:ty) => {
        mod $module {
            use super::*;
            use crate::$module as implemented;

            npu_sys::$list!($export);

            pub(super) fn symbol(name: &str) -> Option<NonNull<c_void>> {
                NonNull::new(find(name)?)
            }
        }

        pub(crate) fn $table(absent: &[&str]) -> $rust {
            let find = |name| if absent.contains(&name) { None } else { $module::symbol(name) };
            // SAFETY: the functions are this file's, exported by the rows that the table is made
            // of.
            let table = unsafe { <$rust>::from_symbols(&find) };
            table.expect("every required row is exported")
        }
    };
}

family!(acl, acl_table, export, acl_table, Acl);
family!(nnop, nnop_table, export, nnop_table, Nnop);
family!(ops, ops_table, export_ops, ops_table, Ops);
family!(hccl, hccl_table, export, hccl_table, Hccl);

/// The address of the function of C with this name.
#[must_use]
pub fn symbol(name: &str) -> Option<NonNull<c_void>> {
    let families = [acl::symbol, nnop::symbol, ops::symbol, hccl::symbol];
    families.iter().find_map(|find| find(name))
}
