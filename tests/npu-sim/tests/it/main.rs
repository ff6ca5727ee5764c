//! The simulator, and the safe layer of `npu-sys` on it: what is allowed works, and every rule has
//! a test that breaks it.

#![expect(unsafe_code, reason = "calls C as a careless program would")]
#![expect(clippy::unwrap_used, reason = "a test that cannot go on stops there")]
#![expect(clippy::multiple_unsafe_ops_per_block, reason = "one argument is for all of them")]

mod faults;
mod fused;
mod hccl;
mod library;
mod operators;
mod runtime;
mod safe;
mod sequences;

use std::ffi::c_void;
use std::ptr;

use npu_sim::{Config, Session, Soc, acl, nnop, start};
use npu_sys::sys::*;
use npu_sys::{Error, Result};

fn session() -> Session {
    start(Config::default())
}

fn session_on(soc: Soc) -> Session {
    start(Config { soc, ..Config::default() })
}

/// The status of a call that must fail.
#[track_caller]
fn code<T: std::fmt::Debug>(result: Result<T>) -> i32 {
    match result {
        Err(Error::Status { status, .. }) => status.code(),
        other => panic!("a status was expected, not {other:?}"),
    }
}

/// Asserts that exactly one rule was broken, and that its report contains `word`.
#[track_caller]
fn one_violation(sim: &Session, word: &str) {
    let found = sim.violations();
    assert!(found.len() == 1 && found[0].contains(word), "{word}: {found:?}");
}

/// Initialises AscendCL on a device and makes its own context current.
fn on_device(device: i32) {
    // SAFETY: of the simulator; initialising twice is a status.
    let _ = unsafe { acl().aclInit(ptr::null()) };
    // SAFETY: of the simulator.
    unsafe { acl().aclrtSetDevice(device) }.unwrap();
}

fn malloc(bytes: usize) -> *mut c_void {
    let mut address = ptr::null_mut();
    let policy = AclrtMemMallocPolicy::HUGE_FIRST;
    // SAFETY: writes to a local.
    unsafe { acl().aclrtMalloc(&raw mut address, bytes, policy) }.unwrap();
    address
}

fn free(address: *mut c_void) {
    // SAFETY: of `malloc`.
    unsafe { acl().aclrtFree(address) }.unwrap();
}

fn new_stream() -> AclrtStream {
    let mut stream = AclrtStream::NULL;
    // SAFETY: writes to a local.
    unsafe { acl().aclrtCreateStream(&raw mut stream) }.unwrap();
    stream
}

fn end_stream(stream: AclrtStream) {
    // SAFETY: of `new_stream`.
    unsafe { acl().aclrtDestroyStream(stream) }.unwrap();
}

fn synchronize(stream: AclrtStream) -> Result<()> {
    // SAFETY: of `new_stream`.
    unsafe { acl().aclrtSynchronizeStream(stream) }
}

/// Copies to a device, and waits.
fn upload<T>(to: *mut c_void, from: &[T]) {
    let (bytes, kind) = (size_of_val(from), AclrtMemcpyKind::HOST_TO_DEVICE);
    // SAFETY: both have so many bytes, or the simulator says that they do not.
    unsafe { acl().aclrtMemcpy(to, bytes, from.as_ptr().cast(), bytes, kind) }.unwrap();
}

fn download<T: Copy + Default>(from: *mut c_void, count: usize) -> Vec<T> {
    let mut to = vec![T::default(); count];
    let (bytes, kind) = (size_of_val(&to[..]), AclrtMemcpyKind::DEVICE_TO_HOST);
    // SAFETY: as above; every pattern of bits is a number.
    unsafe { acl().aclrtMemcpy(to.as_mut_ptr().cast(), bytes, from, bytes, kind) }.unwrap();
    to
}

/// A tensor at an address; null if that is refused.
fn try_tensor(address: *mut c_void, dims: &[i64], dtype: AclDataType) -> Result<*mut AclTensor> {
    let (rank, none) = (dims.len() as u64, ptr::null());
    // SAFETY: the dimensions are as many as is said.
    unsafe {
        let (nd, at) = (AclFormat::ND, dims.as_ptr());
        nnop().aclCreateTensor(at, rank, dtype, none, 0, nd, at, rank, address)
    }
}

fn tensor(address: *mut c_void, dims: &[i64], dtype: AclDataType) -> *mut AclTensor {
    try_tensor(address, dims, dtype).unwrap()
}

fn scalar(mut value: f32) -> *mut AclScalar {
    // SAFETY: reads a local, of the type that is said.
    unsafe { nnop().aclCreateScalar((&raw mut value).cast(), AclDataType::FLOAT) }.unwrap()
}

fn end_tensor(tensor: *mut AclTensor) {
    // SAFETY: of `tensor`.
    unsafe { nnop().aclDestroyTensor(tensor) }.unwrap();
}

fn end_scalar(scalar: *mut AclScalar) {
    // SAFETY: of `scalar`.
    unsafe { nnop().aclDestroyScalar(scalar) }.unwrap();
}
