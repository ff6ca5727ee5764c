//! Numbers of a step's launches, copies and waits, as counted by the fake GPU.

use std::ffi::CStr;
use std::sync::Arc;
use std::time::Duration;

use collective::ProcessGroup;
use fused_optim::DType;
use parking_lot::Mutex;
use runner::data::{Array, ArrayData, Batch};
use runner::engine::candle::candle_core::Module;
use runner::engine::candle::candle_nn::VarBuilder;
use runner::engine::candle::nn::{Linear, linear};
use runner::engine::candle::{
    CandleEngine, CandleModel, CandleOptions, Loss, Outputs, TensorBatch, candle_core, ops,
};
use runner::engine::{
    CompileOptions, ComputeDevice, DeviceTensor, Engine, GradSink, Losses, SharedSink,
};
use runner::hooks::{Hook, Priority};
use runner::zoo::{Gpt, GptOptions, ResNet, ResNetOptions, Transformer, TransformerOptions};
use runner::{Result, Runner};

use super::{GPU, OFFLOADED, OPTIM, builder, run};
use crate::gpu;
use crate::step::train_step;

/// Returns a function of the fake GPU, if that is in use.
#[expect(unsafe_code, reason = "the fake GPU is a library of C")]
pub(super) fn of_the_fake(name: &CStr) -> Option<*mut libc::c_void> {
    // SAFETY: looks up a symbol by name in the loaded libraries.
    let address = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    (!address.is_null()).then_some(address)
}

/// Bytes copied to and from GPUs by this thread, if the GPU is the fake one.
#[expect(unsafe_code, reason = "the fake GPU is a library of C")]
fn copied() -> Option<[u64; 2]> {
    let address = of_the_fake(c"fake_gpu_copied")?;
    // SAFETY: the function of this name has no arguments and returns the address of two words of
    // this thread.
    let copied = unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *const [u64; 2]>(address)
    };
    // SAFETY: as above.
    Some(unsafe { *copied() })
}

/// Number of operations that this thread launched on GPUs, if the GPU is the fake one.
#[expect(unsafe_code, reason = "the fake GPU is a library of C")]
fn launched() -> Option<u64> {
    let address = of_the_fake(c"fake_gpu_launched")?;
    // SAFETY: the function of this name has no arguments and returns the address of two words of
    // this thread.
    let launched = unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn() -> *const [u64; 2]>(address)
    };
    // SAFETY: as above.
    Some(unsafe { *launched() }[0])
}

/// Number of calls of the fake GPU's function of this name, or of its events of this name.
#[expect(unsafe_code, reason = "the fake GPU is a library of C")]
fn calls(name: &CStr) -> Option<i32> {
    let address = of_the_fake(c"fake_calls")?;
    // SAFETY: the function of this name takes a C string and a device index, and returns a number.
    let calls = unsafe {
        std::mem::transmute::<
            *mut libc::c_void,
            extern "C" fn(*const libc::c_char, libc::c_int) -> libc::c_int,
        >(address)
    };
    Some(calls(name.as_ptr(), 0))
}

struct Forget;

impl GradSink for Forget {
    fn ready(&mut self, _: usize, _: fused_optim::Slice<'_>) -> train_step::Result<()> {
        Ok(())
    }

    fn ready_on_device(&mut self, _: usize, _: Box<dyn DeviceTensor>) -> train_step::Result<()> {
        Ok(())
    }
}

fn small_resnet() -> ResNetOptions {
    ResNetOptions { width: 4, blocks: vec![1, 1], stem_max_pool: true, ..ResNetOptions::default() }
}

/// Eight images with labels.
fn small_batch(pixels: impl Into<ArrayData>) -> Batch {
    Batch::new()
        .with("inputs", Array::new([8, 1, 8, 8], pixels).unwrap())
        .with("labels", Array::new([8], ArrayData::I64(vec![3; 8])).unwrap())
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn compiled_step_copies_its_batch_to_the_gpu_without_waiting() {
    let _gpu = gpu::alone();
    let net = small_resnet();
    let pixels: Vec<u8> = (0..8 * 64).map(|i| (i * 37 % 256) as u8).collect();
    let floats = ArrayData::F32(pixels.iter().map(|pixel| f32::from(*pixel) / 255.0).collect());
    let (floats, bytes) = (small_batch(floats), small_batch(pixels));
    // Launches of the second step, and the bytes that it copies to the GPU.
    let step = |compiled: bool, batch: &Batch| {
        let options = CandleOptions { device: ComputeDevice::Cuda(0), ..Default::default() };
        let mut engine = CandleEngine::new(options, |vb| ResNet::new(&net, vb)).unwrap();
        if compiled {
            engine.compile(&CompileOptions::default()).unwrap();
        }
        let sink: SharedSink = Arc::new(Mutex::new(Forget));
        train_step(&mut engine, None, batch, 1.0, &sink).unwrap();
        let names = [
            c"a copy of pageable memory",
            c"memory returned",
            c"cuStreamSynchronize",
            c"cuEventSynchronize",
        ];
        let counts = || names.map(|name| calls(name).unwrap());
        let before = [launched().unwrap(), copied().unwrap()[0]];
        let counts_before = counts();
        let losses = train_step(&mut engine, None, batch, 1.0, &sink).unwrap();
        let more = || [0, 1, 2, 3].map(|i| counts()[i] - counts_before[i]);
        assert_eq!(more()[1..], [0; 3], "memory returned and waits");
        // Without `compile` candle sends the strides of copied tensors.
        assert!(!compiled || more()[0] == 0, "{} copies of pageable memory", more()[0]);
        let sent = [launched().unwrap() - before[0], copied().unwrap()[0] - before[1]];
        for _ in 0..2 {
            losses.scalars().unwrap();
            assert_eq!(more()[1..], [0, 0, 1], "one wait for the losses, once they are read");
        }
        sent
    };
    let ([composed, _], [kernels, sent]) = (step(false, &floats), step(true, &floats));
    assert!(kernels < composed / 2, "{kernels} launches, {composed} of compositions");
    assert_eq!(sent, 8 * 64 * 4 + 8 * 8, "images and labels");
    assert_eq!(step(true, &bytes), [kernels + 1, 8 * 64 + 8 * 8], "bytes, scaled by one kernel");
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn first_gradient_on_a_gpu_is_stored_and_not_added_to_zeros() {
    let _gpu = gpu::alone();
    let resnet = ResNetOptions { width: 4, blocks: vec![1, 1], ..ResNetOptions::default() };
    let transformer =
        TransformerOptions { image_size: 8, patch_size: 2, width: 16, ..Default::default() };
    type Build = Box<dyn FnOnce(VarBuilder<'static>) -> candle_core::Result<Box<dyn CandleModel>>>;
    let models: [(Build, [i32; 2]); 2] = [
        // Two blocks use their input twice. Running averages have a kernel of their own.
        (Box::new(move |vb| Ok(Box::new(ResNet::new(&resnet, vb)?))), [0, 2]),
        // Four sums in forward, and four that use their input twice. candle's mean over positions
        // has gradients of four tensors, and its backward an initial constant.
        (Box::new(move |vb| Ok(Box::new(Transformer::new(&transformer, vb)?))), [1 + 4, 4 + 4 + 4]),
    ];
    for (build, expected) in models {
        let pixels = vec![0.5; 8 * 64];
        let batch = Batch::new()
            .with("inputs", Array::new([8, 1, 8, 8], ArrayData::F32(pixels)).unwrap())
            .with("labels", Array::new([8], ArrayData::I64(vec![3; 8])).unwrap());
        let options = CandleOptions { device: ComputeDevice::Cuda(0), ..Default::default() };
        let mut engine = CandleEngine::new(options, build).unwrap();
        engine.compile(&CompileOptions::default()).unwrap();
        let sink: SharedSink = Arc::new(Mutex::new(Forget));
        train_step(&mut engine, None, &batch, 1.0, &sink).unwrap();
        let counts = || {
            // Sums of candle and of this engine.
            let [fills, candle, ours] =
                [c"cuMemsetD8Async", c"badd_f32", c"add"].map(|name| calls(name).unwrap());
            [fills, candle + ours]
        };
        let before = counts();
        train_step(&mut engine, None, &batch, 1.0, &sink).unwrap();
        let [fills, adds] = counts();
        assert_eq!([fills - before[0], adds - before[1]], expected, "fills and sums");
    }
}

/// Between cuDNN's convolutions images are channels-last: only weights and their gradients are
/// transposed.
#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn half_precision_step_transposes_and_copies_no_activations() {
    let _gpu = gpu::alone();
    let net = small_resnet();
    let pixels = (0..8 * 64).map(|i| (i * 37 % 256) as u8).collect::<Vec<_>>();
    let batch = small_batch(pixels);
    let options = CandleOptions { device: ComputeDevice::Cuda(0), ..Default::default() };
    let mut engine = CandleEngine::new(options, |vb| ResNet::new(&net, vb)).unwrap();
    engine.compile(&CompileOptions::default()).unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Forget));
    let mut step = || {
        train_step(&mut engine, Some(DType::F16), &batch, 1.0, &sink).unwrap();
    };
    step();
    // Four weights of 3 x 3 over several channels, each in forward, for the gradient of images, and
    // for its own gradient.
    let expected = [
        (c"transpose", 4 + 4 + 4),
        (c"cudnnConvolutionForward", 6),
        (c"cudnnConvolutionBackwardData", 5),
        (c"cudnnConvolutionBackwardFilter", 6),
        (c"im2col", 0),
        (c"ucopy_f16", 0),
        // Two blocks use their input twice.
        (c"add", 2),
        (c"badd_f16", 0),
        (c"moments_last", 6),
        (c"track", 0),
        (c"normalize_last", 6),
        (c"norm_sums_last", 6),
        (c"norm_backward_last", 6),
        (c"max_pool_last", 1),
        (c"max_pool_last_backward", 1),
        (c"mean_pool_last", 1),
        (c"mean_pool_last_backward", 1),
        (c"normalize", 0),
        (c"max_pool", 0),
        (c"mean_pool", 0),
    ];
    let counts = || expected.map(|(name, _)| calls(name).unwrap());
    let before = counts();
    step();
    let found = counts();
    for (i, (name, wanted)) in expected.into_iter().enumerate() {
        assert_eq!(found[i] - before[i], wanted, "{}", name.to_string_lossy());
    }
}

/// Classifies by the last eight numbers of each row.
struct Last(Linear);

impl CandleModel for Last {
    fn loss(&self, batch: &TensorBatch) -> candle_core::Result<Loss> {
        let inputs = batch.get("inputs")?;
        let x = inputs.narrow(1, inputs.dim(1)? - 8, 8)?.contiguous()?;
        Ok(Loss::new(ops::cross_entropy(&self.0.forward(&x)?, batch.get("labels")?)?))
    }

    fn predict(&self, _: &TensorBatch) -> candle_core::Result<Outputs> {
        Ok(Outputs::new())
    }
}

/// Blocks or unblocks a stream of the fake GPU.
#[expect(unsafe_code, reason = "the fake GPU is a library of C")]
fn on_stream(name: &CStr, stream: usize) {
    let address = of_the_fake(name).unwrap();
    // SAFETY: the functions of these names take a stream.
    let call = unsafe {
        std::mem::transmute::<*mut libc::c_void, extern "C" fn(*mut libc::c_void)>(address)
    };
    call(std::ptr::with_exposed_provenance_mut(stream));
}

/// More than pinned memory can hold at a time: in the engine's stream the host would wait for the
/// previous step.
#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn large_batch_is_copied_during_the_previous_step() {
    let _gpu = gpu::alone();
    let width = 10 << 18;
    let batch = |step: usize| {
        let inputs = (0..8 * width).map(|i| ((i + step) % 17) as f32 / 17.0).collect();
        Batch::new()
            .with("inputs", Array::new([8, width], ArrayData::F32(inputs)).unwrap())
            .with("labels", Array::new([8], ArrayData::I64(vec![3; 8])).unwrap())
    };
    let engine = |device| {
        let options = CandleOptions { device, check_gradients: false, ..Default::default() };
        CandleEngine::new(options, |vb| Ok(Last(linear(8, 10, vb.pp("fc"))?))).unwrap()
    };
    let sink: SharedSink = Arc::new(Mutex::new(Forget));
    let (mut cpu, mut gpu) = (engine(ComputeDevice::Cpu), engine(ComputeDevice::Cuda(0)));
    gpu.compile(&CompileOptions::default()).unwrap();
    let stream = gpu.gpu().unwrap().stream().cu_stream().expose_provenance();
    for step in 0..7 {
        let wanted = train_step(&mut cpu, None, &batch(step), 1.0, &sink).unwrap();
        // The first steps allocate memory in order of the engine's stream.
        if step >= 4 {
            on_stream(c"fake_stream_block", stream);
        }
        let (done, is_done) = std::sync::mpsc::channel();
        let patience = std::thread::spawn(move || {
            let is_held = is_done.recv_timeout(Duration::from_secs(60)).is_err();
            on_stream(c"fake_stream_unblock", stream);
            is_held
        });
        let losses = train_step(&mut gpu, None, &batch(step), 1.0, &sink).unwrap();
        // There is no receiver if the step was blocked.
        let _ = done.send(());
        assert!(!patience.join().unwrap(), "step {step} waits for the one before");
        let [wanted, found] = [&wanted, &losses].map(|losses| losses.scalars().unwrap()[0].1);
        assert!((wanted - found).abs() < 1e-5, "{step}: {wanted} {found}");
    }
}

/// A ResNet-50 except for its width: 1 x 1 convolutions need no transposed weights, and their
/// images are channels-last as well.
#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn step_of_bottlenecks_transposes_only_3_x_3_weights() {
    let _gpu = gpu::alone();
    let net = ResNetOptions {
        in_channels: 3,
        width: 4,
        blocks: vec![3, 4, 6, 3],
        bottleneck: true,
        stem_kernel: 7,
        stem_stride: 2,
        stem_max_pool: true,
        ..ResNetOptions::default()
    };
    let pixels = (0..2 * 3 * 33 * 33).map(|i| (i * 37 % 256) as u8).collect::<Vec<_>>();
    let batch = Batch::new()
        .with("inputs", Array::new([2, 3, 33, 33], ArrayData::U8(pixels)).unwrap())
        .with("labels", Array::new([2], ArrayData::I64(vec![3; 2])).unwrap());
    // The stem, three convolutions of each block, and four shortcuts.
    let (blocks, convolutions) = (16, 1 + 3 * 16 + 4);
    let expected = [
        // Weights of the stem and of each block, in forward, for the gradient of images, and for
        // their own gradients; and the images, in forward and for the stem's gradient.
        (c"transpose", 3 * (blocks + 1) - 1 + 2),
        (c"cudnnConvolutionForward", convolutions),
        (c"cudnnConvolutionBackwardData", convolutions - 1),
        (c"cudnnConvolutionBackwardFilter", convolutions),
        (c"im2col", 0),
        (c"ucopy_bf16", 0),
        // Of weights, and of the last layer's bias and input.
        (c"cast_from_f32", convolutions + 3),
        (c"add", blocks),
        (c"add_relu", blocks),
        (c"moments_last", convolutions),
        (c"track", 0),
        (c"normalize_last", convolutions),
        (c"norm_sums_last", convolutions),
        (c"norm_backward_last", convolutions),
        (c"normalize", 0),
    ];
    assert_counts(|vb| ResNet::new(&net, vb), &batch, &expected);
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn gpt_in_mixed_precision_casts_neither_logits_nor_gradients_of_weights() {
    let _gpu = gpu::alone();
    let gpt = GptOptions { vocab_size: 24, context: 8, width: 16, heads: 2, layers: 12 };
    let tokens = |step: i64| {
        let tokens = (0..4 * 8).map(|i| (i * step) % 24).collect();
        Array::new([4, 8], ArrayData::I64(tokens)).unwrap()
    };
    let batch = Batch::new().with("inputs", tokens(7)).with("labels", tokens(11));
    let layers = 12;
    let expected = [
        // Weights, including the token embedding, and biases. No results of the norms, nor their
        // gradients.
        (c"cast_from_f32", 8 * layers + 1),
        // Gradients of sums in the residual stream.
        (c"cast_from_f32_sums", 2 * layers),
        (c"cast_to_f32", 0),
        (c"add_bias", 0),
        (c"a product with a bias", 4 * layers),
        // Gradients of the biases of queries, keys and values, and of the positions, which are
        // added to each sample. Those of other biases are left by the casts above and by GELU.
        (c"column_sums", layers + 1),
        (c"add_rows", 1),
        (c"layer_norm_wide", 2 * layers + 1),
        (c"layer_norm_wide_backward", 2 * layers + 1),
        (c"gelu", layers),
        (c"gelu_backward_sums", layers),
        (c"add_to_f32", 2 * layers),
        // Sums of gradients: of the residual stream, and of the two uses of the token embedding.
        (c"add", 2 * layers + 1),
        (c"attention", layers),
        (c"attention_backward", layers),
        (c"attention_backward_keys", layers),
        (c"softmax", 0),
        (c"cross_entropy", 1),
        (c"cross_entropy_backward", 1),
        (c"embedding", 1),
        // candle's sums would be passes over the largest tensor, the gradient of the reshaped
        // logits.
        (c"badd_bf16", 0),
        (c"badd_f32", 0),
        (c"fast_sum_small_f32", 0),
        (c"ends_of_ids", 1),
        (c"embedding_backward", 1),
    ];
    assert_counts(|vb| Gpt::new(&gpt, vb), &batch, &expected);
}

/// Checks the numbers of these calls in a step of bf16 mixed precision.
fn assert_counts<M: CandleModel + 'static>(
    build: impl FnOnce(VarBuilder<'static>) -> candle_core::Result<M>,
    batch: &Batch,
    expected: &[(&CStr, i32)],
) {
    let options = CandleOptions { device: ComputeDevice::Cuda(0), ..Default::default() };
    let mut engine = CandleEngine::new(options, build).unwrap();
    engine.compile(&CompileOptions::default()).unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Forget));
    train_step(&mut engine, Some(DType::Bf16), batch, 1.0, &sink).unwrap();
    let counts = || expected.iter().map(|(name, _)| calls(name).unwrap()).collect::<Vec<_>>();
    let before = counts();
    train_step(&mut engine, Some(DType::Bf16), batch, 1.0, &sink).unwrap();
    let found: Vec<_> = counts().iter().zip(before).map(|(now, then)| now - then).collect();
    let wanted: Vec<_> = expected.iter().map(|(_, wanted)| *wanted).collect();
    assert_eq!(found, wanted, "{:?}", expected.iter().map(|(name, _)| name).collect::<Vec<_>>());
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn transformer_in_mixed_precision_casts_less_than_pytorch() {
    let _gpu = gpu::alone();
    let layers = 8;
    let vit = TransformerOptions {
        image_size: 8,
        patch_size: 2,
        width: 16,
        feed_forward: 64,
        layers,
        ..Default::default()
    };
    let batch = Batch::new()
        .with("inputs", Array::new([8, 1, 8, 8], ArrayData::U8(vec![99; 8 * 64])).unwrap())
        .with("labels", Array::new([8], ArrayData::I64(vec![3; 8])).unwrap());
    let options = CandleOptions { device: ComputeDevice::Cuda(0), ..Default::default() };
    let mut engine = CandleEngine::new(options, |vb| Transformer::new(&vit, vb)).unwrap();
    engine.compile(&CompileOptions::default()).unwrap();
    let sink: SharedSink = Arc::new(Mutex::new(Forget));
    let mut step = || {
        let names = [
            c"cast_from_f32",
            c"cast_from_f32_sums",
            c"cast_to_f32",
            c"add_bias",
            c"a product with a bias",
            c"column_sums",
        ];
        let counts = || names.map(|name| calls(name).unwrap());
        let before = counts();
        train_step(&mut engine, Some(DType::F16), &batch, 1.0, &sink).unwrap();
        let after = counts();
        [0, 1, 2, 3, 4, 5].map(|i| after[i] - before[i])
    };
    step();
    let layers = layers as i32;
    let products = 4 * layers + 2;
    // To f16: weights, biases, the input of the head, the images; and gradients of sums in the
    // residual stream. To f32: the embedded patches, and the input of the head again.
    let (to_f16, of_sums, to_f32) = (2 * products + 3, 2 * layers, 2);
    // Column sums are gradients of the positions, and of biases for which neither GELU nor those
    // casts leave sums: of queries, keys and values, of the patches and of the head.
    assert_eq!(step(), [to_f16, of_sums, to_f32, 0, products, layers + 3]);
    // PyTorch also casts results of the norms and their gradients, and gradients of weights and
    // biases.
    assert!(to_f16 + of_sums + to_f32 < 2 * 2 * products + 6 * layers);
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn step_copies_no_weights_and_copies_gradients_only_for_averages_on_the_host() {
    let _gpu = gpu::shared();
    // Bytes that a rank copies to and from the GPU in a step of two batches.
    let a_step = |device: &str, groups: &dyn Fn() -> Vec<ProcessGroup>| {
        let dir = tempfile::tempdir().unwrap();
        let more = format!(
            "{device}
            model = {{ type = 'Mlp', in_features = 64, hidden = [999], num_classes = 10 }}
            default_hooks = {{ checkpoint = {{ type = 'CheckpointHook', by_epoch = false, interval = 99 }} }}
            optim_wrapper = {{ type = 'AmpOptimWrapper', optimizer = {{ type = 'AdamW' }}, \
            accumulative_counts = 2, clip_grad = {{ max_norm = 1 }} }}
            custom_hooks = [{{ type = 'EMAHook' }}]"
        );
        let of = |group: ProcessGroup, batches: usize| {
            let before = copied().unwrap();
            let dir = dir.path().join(batches.to_string());
            let builder = builder(&dir, &more, batches, false).unwrap().process_group(group);
            builder.build().unwrap().train().unwrap();
            let after = copied().unwrap();
            [after[0] - before[0], after[1] - before[1]]
        };
        let [few, many] = [8, 12].map(|batches| {
            std::thread::scope(|scope| {
                let of = &of;
                let ranks =
                    groups().into_iter().map(|group| scope.spawn(move || of(group, batches)));
                let ranks: Vec<_> = ranks.collect();
                ranks.into_iter().map(|rank| rank.join().unwrap()).last().unwrap()
            })
        });
        [(many[0] - few[0]) / 2, (many[1] - few[1]) / 2]
    };
    let ranks = |count| move || ProcessGroup::threads(count, Duration::from_secs(60)).unwrap();
    let weights = 4 * (64 * 999 + 999 + 999 * 10 + 10);
    // Two batches of 8 images of 64 numbers, labels, losses, addresses, shapes; the overflow flag
    // and a norm.
    let little = |[to, from]: [u64; 2]| {
        assert!(to < 16 << 10 && from < 512, "{to} bytes there, {from} back");
    };
    little(a_step(GPU, &ranks(1)));
    little(a_step(GPU, &|| crate::nccl::ranks().unwrap()));
    let [to, from] = a_step(GPU, &ranks(2));
    assert!(
        to > weights && from > weights,
        "{to} bytes of averages there, {from} back of {weights}"
    );
    let [to, from] = a_step(OFFLOADED, &ranks(1));
    assert!(to > weights && from > 2 * weights, "{to} bytes there, {from} back of {weights}");
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn products_of_f32_are_in_tf32_if_configured() {
    let _gpu = gpu::alone();
    // Numbers of products in f32 and in TF32.
    let products = |more: &str| {
        let dir = tempfile::tempdir().unwrap();
        let counts =
            || [c"a product of f32", c"a product in TF32"].map(|name| calls(name).unwrap());
        let before = counts();
        run(dir.path(), &format!("device = 'cuda'\n{OPTIM}\n{more}"), 2, false);
        [0, 1].map(|i| counts()[i] - before[i])
    };
    for compiled in ["", "compile = true"] {
        let [default, tf32] = products(compiled);
        assert!(default > 0 && tf32 == 0, "{default} and {tf32}");
        for (precision, wanted) in
            [("high", [0, default]), ("medium", [0, default]), ("highest", [default, 0])]
        {
            let more =
                format!("{compiled}\nenv_cfg = {{ float32_matmul_precision = '{precision}' }}");
            assert_eq!(products(&more), wanted, "{precision} {compiled}");
        }
    }
}

/// Records the number of waits of the host after each step.
struct Waits(Arc<Mutex<Vec<i32>>>);

impl Hook for Waits {
    fn name(&self) -> &'static str {
        "Waits"
    }

    fn priority(&self) -> Priority {
        Priority::LOWEST
    }

    fn after_train_iter(&mut self, _: &mut Runner, _: &Batch, _: &Losses) -> Result<()> {
        let waits = [c"cuStreamSynchronize", c"cuEventSynchronize"];
        self.0.lock().push(waits.iter().map(|name| calls(name).unwrap()).sum());
        Ok(())
    }
}

#[test]
#[ignore = "needs the fake GPU, which counts and lets ranks share it: .ci/devices"]
fn step_does_not_wait_if_its_losses_are_not_read() {
    let _gpu = gpu::alone();
    // Waits of each step after the third.
    let waits_of = |more: &str| {
        let (dir, counts) = (tempfile::tempdir().unwrap(), Arc::default());
        let builder = builder(dir.path(), more, 8, false).unwrap();
        builder.hook(Box::new(Waits(Arc::clone(&counts)))).build().unwrap().train().unwrap();
        let counts = counts.lock();
        counts[2..7].windows(2).map(|pair| pair[1] - pair[0]).collect::<Vec<_>>()
    };
    let logs = |interval: usize, kind: &str, more: &str| {
        waits_of(&format!(
            "device = 'cuda'
            default_hooks = {{ logger = {{ type = 'LoggerHook', interval = {interval} }}, \
            checkpoint = {{ type = 'CheckpointHook', by_epoch = false, interval = 99 }} }}
            optim_wrapper = {{ type = '{kind}', optimizer = {{ type = 'AdamW' }}{more} }}"
        ))
    };
    assert_eq!(logs(99, "OptimWrapper", ""), [0; 4]);
    let bf16 = ", dtype = 'bfloat16', skip_non_finite = false";
    assert_eq!(logs(99, "AmpOptimWrapper", bf16), [0; 4]);
    // Mixed precision waits to learn whether the step was skipped, which determines the next loss
    // scale.
    assert_eq!(logs(99, "AmpOptimWrapper", ""), [1; 4]);
    assert_eq!(logs(99, "AmpOptimWrapper", ", clip_grad = { max_norm = 1 }"), [1; 4]);
}
