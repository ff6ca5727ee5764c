//! Points on spirals, one spiral for each class.

use tch::{Kind, Tensor};

pub const FEATURES: i64 = 2;
pub const CLASSES: i64 = 3;

/// Points and their classes, in an order in which neighbours differ in class.
pub fn data(count: i64) -> (Tensor, Tensor) {
    let index = Tensor::arange(count, (Kind::Int64, tch::Device::Cpu));
    let class = index.remainder(CLASSES);
    // A walk over the radii that does not follow the order of the points.
    let radius = (&index * 1_031).remainder(count).to_kind(Kind::Float) / count as f64;
    let angle = &radius * 5.0 + &class * (std::f64::consts::TAU / CLASSES as f64);
    (Tensor::stack(&[&radius * angle.cos(), &radius * angle.sin()], 1), class)
}
