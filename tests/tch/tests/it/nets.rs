//! The zoo's networks in tch, with the same parameters in the same order.

use runner::Result;
use runner::data::Batch;
use tch::nn::{self, Module, ModuleT, Path};
use tch::{Kind, Tensor};
use tch_engine::{TchModel, field};

#[derive(Clone, Copy, Debug)]
pub enum Net {
    Mlp,
    ResNet,
}

impl Net {
    pub const ALL: [Self; 2] = [Self::Mlp, Self::ResNet];

    /// For images of 8 x 8.
    pub fn build(self, vs: &Path<'_>, classes: i64) -> Classifier {
        Classifier(match self {
            Self::Mlp => {
                let vs = vs / "layers";
                Box::new(Mlp([linear(&vs / 0, 64, 16), linear(&vs / 1, 16, classes)]))
            }
            Self::ResNet => Box::new(ResNet {
                stem: conv_norm(vs / "conv1", vs / "bn1", 1, 16, 3, 1),
                blocks: [
                    Block::new(&(vs / "layer1" / 0), 16, 16, 1),
                    Block::new(&(vs / "layer2" / 0), 16, 32, 2),
                ],
                fc: linear(vs / "fc", 32, classes),
            }),
        })
    }
}

/// A network whose outputs are logits.
pub struct Classifier(Box<dyn ModuleT>);

impl Classifier {
    fn logits(&self, batch: &Batch, train: bool) -> Result<Tensor> {
        let x = field(batch, "inputs")?;
        let x = if x.kind() == Kind::Uint8 { x.to_kind(Kind::Float) / 255.0 } else { x };
        Ok(self.0.forward_t(&x, train))
    }
}

impl TchModel for Classifier {
    fn loss(&self, batch: &Batch) -> Result<Tensor> {
        let labels = field(batch, "labels")?;
        Ok(self.logits(batch, true)?.cross_entropy_for_logits(&labels))
    }

    fn predict(&self, batch: &Batch) -> Result<Vec<(String, Tensor)>> {
        Ok(vec![("logits".to_owned(), self.logits(batch, false)?)])
    }
}

#[derive(Debug)]
struct Mlp([nn::Linear; 2]);

impl ModuleT for Mlp {
    fn forward_t(&self, x: &Tensor, _: bool) -> Tensor {
        let [first, second] = &self.0;
        second.forward(&first.forward(&x.flatten(1, -1)).relu())
    }
}

#[derive(Debug)]
struct ResNet {
    stem: nn::SequentialT,
    blocks: [Block; 2],
    fc: nn::Linear,
}

impl ModuleT for ResNet {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let mut x = self.stem.forward_t(x, train).relu().max_pool2d(3, 2, 1, 1, false);
        for block in &self.blocks {
            x = block.forward_t(&x, train);
        }
        self.fc.forward(&x.mean_dim([2, 3].as_slice(), false, None))
    }
}

#[derive(Debug)]
struct Block {
    first: nn::SequentialT,
    second: nn::SequentialT,
    downsample: Option<nn::SequentialT>,
}

impl Block {
    fn new(vs: &Path<'_>, from: i64, to: i64, stride: i64) -> Self {
        let first = conv_norm(vs / "conv1", vs / "bn1", from, to, 3, stride);
        let second = conv_norm(vs / "conv2", vs / "bn2", to, to, 3, 1);
        let downsample = (stride != 1 || from != to).then(|| {
            let vs = vs / "downsample";
            conv_norm(&vs / 0, &vs / 1, from, to, 1, stride)
        });
        Self { first, second, downsample }
    }
}

impl ModuleT for Block {
    fn forward_t(&self, x: &Tensor, train: bool) -> Tensor {
        let y = self.second.forward_t(&self.first.forward_t(x, train).relu(), train);
        let x =
            self.downsample.as_ref().map_or_else(|| x.shallow_clone(), |d| d.forward_t(x, train));
        (y + x).relu()
    }
}

/// `nn::linear` makes its bias first.
fn linear(vs: Path<'_>, from: i64, to: i64) -> nn::Linear {
    nn::Linear { ws: vs.kaiming_uniform("weight", &[to, from]), bs: Some(vs.zeros("bias", &[to])) }
}

/// A convolution without a bias, and batch normalization.
fn conv_norm(
    conv: Path<'_>,
    norm: Path<'_>,
    from: i64,
    to: i64,
    kernel: i64,
    stride: i64,
) -> nn::SequentialT {
    let config = nn::ConvConfig { stride, padding: kernel / 2, bias: false, ..Default::default() };
    nn::seq_t().add(nn::conv2d(conv, from, to, kernel, config)).add(nn::batch_norm2d(
        norm,
        to,
        Default::default(),
    ))
}
