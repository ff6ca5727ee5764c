//! The program `runner check`: samples of data on the model, gradients.

use super::{GOOD, run, stderr};

#[test]
fn check_tries_samples_of_each_data_set_on_the_model() {
    let dir = tempfile::tempdir().unwrap();
    let said = |config: &str| {
        let output = run(dir.path(), config, &["check", "c.toml"], &[("RUST_BACKTRACE", "1")]);
        (output.status.success(), stderr(&output))
    };
    assert_eq!(said(GOOD), (true, String::new()));
    for (good, bad, told) in [
        (
            "num_classes = 10",
            "num_classes = 8",
            ["forward: cross_entropy: label 9 is none of 8", "metric `Accuracy`: label 9 (number "],
        ),
        ("\"Mlp\"\nin_features = 64", "\"ResNet\"\nin_channels = 3", ["forward: conv2d: "; 2]),
    ] {
        assert!(GOOD.contains(good), "{good}");
        let (right, said) = said(&GOOD.replacen(good, bad, 1));
        assert!(!right && said.lines().count() == 2, "{said}");
        let places = ["16:1: train_dataloader", "20:1: val_dataloader"];
        for ((line, at), told) in said.lines().zip(places).zip(told) {
            let told = format!("error: c.toml:{at}: trying samples on the model: {told}");
            assert!(line.starts_with(&told), "{line}\n{told}");
        }
    }
    assert!(!dir.path().join("work_dirs").exists());
}

#[test]
fn check_of_gradients_passes_correct_models_and_refuses_unknown_names() {
    let dir = tempfile::tempdir().unwrap();
    let check = |more: &[&str]| {
        let args = [&["check", "c.toml", "--gradients"][..], more].concat();
        let output = run(dir.path(), GOOD, &args, &[]);
        (output.status.code(), stderr(&output))
    };
    assert_eq!(check(&[]), (Some(0), String::new()));
    let (code, said) = check(&["--ignore", "layers.0.wieght"]);
    assert_eq!(code, Some(1), "{said}");
    assert!(
        said.starts_with("error: unknown parameter `layers.0.wieght`; did you mean `"),
        "{said}"
    );
    assert!(!dir.path().join("work_dirs").exists());
}
