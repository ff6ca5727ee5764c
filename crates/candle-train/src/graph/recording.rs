//! Capture of a stream to a graph.

#![expect(unsafe_code, reason = "lists a graph's nodes, and sends graphs to other threads")]

use std::fmt::{self, Display};
use std::sync::Arc;

use candle_core::cuda_backend::cudarc::driver::{CudaGraph, CudaStream, DriverError, sys};

use super::Refusal;

/// A graph with its number of nodes.
pub(super) struct Graph {
    graph: CudaGraph,
    pub(super) nodes: usize,
    /// Number of tensors created in the graph that outlive it.
    pub(super) kept: usize,
}

// SAFETY: the driver allows use of a graph by any thread, as long as two threads do not use it at
// once (CUDA Driver API, "Graph object thread safety"): it is reached only through `&mut Graphs`,
// and dropped once.
unsafe impl Send for Graph {}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Graph").field("nodes", &self.nodes).finish_non_exhaustive()
    }
}

impl Graph {
    /// Captures the work that `call` enqueues in the stream. The result of `call` is dropped within
    /// the capture.
    pub(super) fn of<R, E: Display>(
        stream: &Arc<CudaStream>,
        call: impl FnOnce() -> Result<R, E>,
    ) -> Result<(Self, R), Refusal> {
        // Other threads are not affected: only this one uses the stream.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        stream.begin_capture(mode).map_err(reason)?;
        let mut capture = Capture(Some(stream));
        let called = call();
        let ended = capture.end();
        let (graph, called) = match (ended, called) {
            (Ok(Some(graph)), Ok(called)) => (graph, called),
            (Ok(None), Ok(_)) => return Err("nothing was captured".to_owned()),
            (Ok(_), Err(why)) => return Err(explained(&why.to_string())),
            (Err(e), Ok(_)) => return Err(reason(e)),
            (Err(e), Err(why)) => return Err(format!("{}: {why}", reason(e))),
        };
        let (nodes, kept) = count(&graph).map_err(reason)?;
        Ok((Self { graph, nodes, kept }, called))
    }

    /// Launches the graph in its stream.
    pub(super) fn launch(&self) -> Result<(), DriverError> {
        self.graph.launch()
    }
}

fn reason(error: DriverError) -> Refusal {
    match error.0 {
        sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED => {
            format!("the capture failed: the step waits for the GPU, or {FREES}")
        }
        _ => error.to_string(),
    }
}

/// Adds a likely cause to an error of a capture. The driver refuses to free memory from before the
/// capture with "invalid argument", which cudarc reports at the next call, and candle only as text.
fn explained(error: &str) -> Refusal {
    let frees = error.contains("CUDA_ERROR_INVALID_VALUE");
    if frees { format!("{error}: perhaps the step {FREES}") } else { error.to_owned() }
}

const FREES: &str = "frees a tensor created in an earlier step";

/// A capture that ends when dropped.
struct Capture<'a>(Option<&'a Arc<CudaStream>>);

impl Capture<'_> {
    fn end(&mut self) -> Result<Option<CudaGraph>, DriverError> {
        let Some(stream) = self.0.take() else { return Ok(None) };
        // Errors of drops, which would otherwise be reported by the next call.
        let dropped = stream.context().check_err();
        let ended = stream.end_capture(sys::CUgraphInstantiate_flags(0));
        let also = stream.context().check_err();
        ended.and_then(|graph| dropped.and(also).map(|()| graph))
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Returns the number of nodes, and the number of allocations minus the number of frees.
fn count(graph: &CudaGraph) -> Result<(usize, usize), DriverError> {
    let mut count = 0;
    // SAFETY: a complete graph; without an array the function only returns the number of nodes.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), std::ptr::null_mut(), &raw mut count) }
        .result()?;
    let mut nodes = vec![std::ptr::null_mut(); count];
    // SAFETY: as above, with an array of that length.
    unsafe { sys::cuGraphGetNodes(graph.cu_graph(), nodes.as_mut_ptr(), &raw mut count) }
        .result()?;
    let (mut allocations, mut frees) = (0_usize, 0);
    for node in nodes {
        // An integer, because newer drivers may have types without a variant.
        let mut kind = 0_u32;
        // SAFETY: a node of the graph, and a pointer to 32 bits for its type.
        unsafe { sys::cuGraphNodeGetType(node, (&raw mut kind).cast()) }.result()?;
        allocations += usize::from(kind == MEM_ALLOC);
        frees += usize::from(kind == MEM_FREE);
    }
    Ok((count, allocations.saturating_sub(frees)))
}

// Values of `CUgraphNodeType` in cuda.h of CUDA 11.4 and later.
const MEM_ALLOC: u32 = 10;
const MEM_FREE: u32 = 11;
