//! Captures of candle's stream, and what the fake GPU holds against them.

use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, DriverError, sys};
use candle_core::{DType, Device, Error, Result, Tensor};

use crate::alone;

/// A device whose tensors wait for no events.
fn device() -> Result<(Device, Arc<CudaStream>)> {
    let device = Device::new_cuda_with_stream(0)?;
    // SAFETY: there is one stream.
    unsafe { device.as_cuda_device()?.disable_event_tracking() };
    let stream = device.as_cuda_device()?.cuda_stream();
    Ok((device, stream))
}

type Captured = std::result::Result<Option<CudaGraph>, DriverError>;

fn capture<R>(stream: &Arc<CudaStream>, call: impl FnOnce() -> R) -> (R, Captured) {
    let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
    stream.begin_capture(mode).unwrap();
    let result = call();
    (result, stream.end_capture(sys::CUgraphInstantiate_flags(0)))
}

fn ends_with_a_word(test: &str, word: &str, body: impl FnOnce() -> Result<()>) {
    let Some((ended, text)) = alone(test, body) else { return };
    assert!(!ended && text.contains(word), "{text}");
}

#[test]
fn a_graph_runs_when_it_is_launched_and_as_often() -> Result<()> {
    let (device, stream) = device()?;
    let x = Tensor::new(&[1f32, 2.0, 3.0], &device)?;
    let sum = Tensor::zeros(3, DType::F32, &device)?;
    // A capture does not run kernels and cannot load them, so `step` first runs outside of one.
    let step = || sum.slice_set(&(x.sqr()? + &sum)?, 0, 0);
    step()?;
    let (called, graph) = capture(&stream, step);
    called?;
    assert_eq!(sum.to_vec1::<f32>()?, [1.0, 4.0, 9.0]);
    let graph = graph.map_err(Error::wrap)?.unwrap();
    for times in 2..5 {
        graph.launch().map_err(Error::wrap)?;
        assert_eq!(sum.to_vec1::<f32>()?, [1.0, 4.0, 9.0].map(|x| x * times as f32));
    }
    x.slice_set(&Tensor::new(&[0f32, 1.0, 0.0], &device)?, 0, 0)?;
    graph.launch().map_err(Error::wrap)?;
    assert_eq!(sum.to_vec1::<f32>()?, [4.0, 17.0, 36.0]);
    Ok(())
}

#[test]
fn waits_and_copies_to_the_host_end_a_capture_with_an_error() -> Result<()> {
    let (device, stream) = device()?;
    let x = Tensor::new(&[1f32, 2.0, 3.0], &device)?;
    let outside = stream.record_event(None).map_err(Error::wrap)?;
    let calls: [&dyn Fn() -> bool; 3] =
        [&|| stream.synchronize().is_err(), &|| x.to_vec1::<f32>().is_err(), &|| {
            stream.wait(&outside).is_err()
        }];
    for call in calls {
        let (failed, graph) = capture(&stream, call);
        assert!(failed && graph.is_err());
    }
    // The result of a failed capture cannot be freed. cudarc records that error in the context;
    // `check_err` clears it.
    let (_, graph) = capture(&stream, || (x.sqr(), stream.synchronize().is_err()));
    assert!(graph.is_err());
    let _ = stream.context().check_err();
    assert_eq!(x.sqr()?.to_vec1::<f32>()?, [1.0, 4.0, 9.0]);
    Ok(())
}

#[test]
fn a_copy_of_pageable_memory_in_a_capture_is_noticed() {
    let test = "graph::a_copy_of_pageable_memory_in_a_capture_is_noticed";
    ends_with_a_word(test, "a copy of pageable memory in a capture", || {
        let (device, stream) = device()?;
        capture(&stream, || Tensor::new(1f32, &device)).0.map(drop)
    });
}

#[test]
fn a_tensor_that_outlives_its_graph_is_noticed() {
    let test = "graph::a_tensor_that_outlives_its_graph_is_noticed";
    ends_with_a_word(test, "does not free what it allocates", || {
        let (device, stream) = device()?;
        let x = Tensor::new(&[1f32, 2.0], &device)?;
        drop(x.sqr()?);
        let (_kept, graph) = capture(&stream, || x.sqr());
        graph.map_err(Error::wrap)?.unwrap().launch().map_err(Error::wrap)
    });
}

#[test]
fn memory_that_is_there_no_more_is_noticed() {
    let test = "graph::memory_that_is_there_no_more_is_noticed";
    ends_with_a_word(test, "uses memory which is there no more", || {
        let (device, stream) = device()?;
        let x = Tensor::new(&[1f32, 2.0], &device)?;
        drop(x.sqr()?);
        let (y, graph) = capture(&stream, || x.sqr().map(drop));
        y?;
        drop(x);
        // The new tensor most likely has the old one's address.
        let _x = Tensor::new(&[1f32, 2.0], &device)?;
        graph.map_err(Error::wrap)?.unwrap().launch().map_err(Error::wrap)
    });
}
