//! Gradients leave for the other ranks while backward still runs.

use std::sync::Arc;
use std::time::Duration;

use collective::reducer::ParamInfo;
use collective::{
    DType, ProcessGroup,
    reducer::{Reducer, ReducerOptions},
};
use fused_optim::Slice;
use parking_lot::Mutex;
use runner::data::{Dataset, Draw};
use runner::engine::candle::{CandleEngine, CandleOptions};
use runner::engine::{Engine, EngineState, GradSink, Model, SharedSink, StepContext};
use runner::zoo::{Digits, ResNet, ResNetOptions, Split};

/// Hands gradients to a reducer, and notes how many buckets had left after each.
struct Watch {
    reducer: Reducer,
    launched: Vec<usize>,
}

impl GradSink for Watch {
    fn ready(&mut self, index: usize, grad: Slice<'_>) -> runner::train_step::Result<()> {
        let Slice::F32(grad) = grad else { panic!("an f32 model has f32 gradients") };
        self.reducer.ready(index, grad)?;
        self.launched.push(self.reducer.launched());
        Ok(())
    }
}

/// One rank's second pass, when the buckets have their final layout: buckets launched after each
/// gradient, and buckets in all.
fn second_pass(group: ProcessGroup) -> (Vec<usize>, usize) {
    let options = ResNetOptions { width: 8, blocks: vec![1, 1], ..ResNetOptions::default() };
    let build = move |vb| ResNet::new(&options, vb);
    let mut engine = CandleEngine::new(CandleOptions::default(), build).unwrap();
    let infos = engine.params().iter().map(|p| ParamInfo::new(&p.name, p.count(), DType::F32));
    let mut caps = ReducerOptions::default();
    (caps.first_bucket_bytes, caps.bucket_bytes) = (4096, 4096);
    let reducer = Reducer::new(group, infos.collect(), caps).unwrap();
    let watch = Arc::new(Mutex::new(Watch { reducer, launched: Vec::new() }));
    let sink: SharedSink = watch.clone();
    let batch = Digits::new(Split::Train, 0).unwrap().batch(&[0, 1, 2, 3].map(Draw::from)).unwrap();
    for _ in 0..2 {
        watch.lock().launched.clear();
        watch.lock().reducer.prepare(true).unwrap();
        let mut state = EngineState::default();
        engine.train_step(&batch, &mut StepContext::new(sink.clone(), &mut state)).unwrap();
        watch.lock().reducer.finish().unwrap();
    }
    let watch = watch.lock();
    assert_eq!(watch.launched.len(), engine.params().len());
    (watch.launched.clone(), watch.reducer.plan().buckets().len())
}

#[test]
fn buckets_leave_while_backward_runs() {
    let groups = ProcessGroup::threads(2, Duration::from_secs(60)).unwrap();
    let ranks = groups.into_iter().map(|group| std::thread::spawn(|| second_pass(group)));
    for rank in ranks.collect::<Vec<_>>() {
        let (launched, buckets) = rank.join().unwrap();
        assert!(buckets >= 3, "{buckets} buckets do not show an overlap");
        // When the middle gradient came, a bucket was on its way; with the last one, all were.
        assert!(launched[launched.len() / 2] >= 1, "{launched:?}");
        assert_eq!(launched.last(), Some(&buckets));
    }
}
