//! Tests of the public interface, as used by a candle program, and of the errors of stock candle.

mod edge_cases;
mod llama;
mod stock_candle;
mod torch_losses;
mod torch_rnn;
mod torch_vectors;

#[path = "../../examples/train_cnn.rs"]
#[expect(dead_code, reason = "the example's main")]
mod train_cnn;

/// Random predictions have a loss of 2.3 and an accuracy of 0.1. The initial values are candle's,
/// which cannot be seeded.
#[test]
fn the_example_learns() {
    let (loss, accuracy) = train_cnn::train(60).unwrap();
    assert!(loss < 1.2 && accuracy > 0.6, "loss {loss}, accuracy {accuracy}");
}
