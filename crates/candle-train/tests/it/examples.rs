//! Tests that run the examples that load data, with small sizes.

#[path = "../../examples/actor_critic.rs"]
#[expect(dead_code, reason = "the example's main")]
mod actor_critic;

#[path = "../../examples/gan.rs"]
#[expect(dead_code, reason = "the example's main")]
mod gan;

#[path = "../../examples/image_folder.rs"]
#[expect(dead_code, reason = "the example's main")]
mod image_folder;

#[path = "../../examples/text_stream.rs"]
#[expect(dead_code, reason = "the example's main")]
mod text_stream;

/// Random predictions have an accuracy of a third.
#[test]
fn image_folder_learns_and_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    image_folder::make_images(dir.path()).unwrap();
    let run = dir.path().join("run.safetensors");
    image_folder::train(dir.path(), &run, 4).unwrap();
    let accuracy = image_folder::train(dir.path(), &run, 8).unwrap();
    assert!(accuracy > 0.6, "{accuracy}");
    let epochs = std::fs::metadata(&run).unwrap().modified().unwrap();
    // All epochs are trained already.
    image_folder::train(dir.path(), &run, 8).unwrap();
    assert_eq!(std::fs::metadata(&run).unwrap().modified().unwrap(), epochs);
}

/// Random predictions have a loss of 5.5.
#[test]
fn text_stream_learns_and_goes_on_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("text.txt");
    text_stream::make_text(&file).unwrap();
    let files = [file.to_string_lossy().into_owned()];
    let [parts, whole] = ["parts", "whole"].map(|name| dir.path().join(name));
    let train = |run, steps| text_stream::train(&files, run, steps).unwrap();
    train(&parts, 20);
    std::fs::copy(&parts, &whole).unwrap();
    train(&parts, 40);
    let loss = train(&parts, 60);
    assert!(loss < 2.5, "{loss}");
    assert_eq!(loss, train(&whole, 60));
}

#[test]
fn gan_learns_and_goes_on_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let [parts, whole] = ["parts", "whole"].map(|name| dir.path().join(name));
    let expected = gan::train(&whole, 3).unwrap();
    gan::train(&parts, 1).unwrap();
    gan::train(&parts, 2).unwrap();
    assert_eq!(gan::train(&parts, 3).unwrap(), expected);
    // A discriminator that guesses has a loss of 1.39.
    assert!(expected[1] < 1.3, "{expected:?}");
}

/// Without a force the mean reward is about -0.5.
#[test]
fn actor_critic_learns_and_goes_on_exactly() {
    let dir = tempfile::tempdir().unwrap();
    let [parts, whole] = ["parts", "whole"].map(|name| dir.path().join(name));
    let expected = actor_critic::train(&whole, 60).unwrap();
    actor_critic::train(&parts, 20).unwrap();
    assert_eq!(actor_critic::train(&parts, 60).unwrap(), expected);
    assert!(expected > -0.3, "{expected}");
}
