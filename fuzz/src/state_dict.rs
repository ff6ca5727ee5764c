//! Parses arbitrary bytes as an optimizer's state dict.
//!
//! Checks: a parsed state survives a round trip, and loading it either succeeds or changes nothing.

use fused_optim::{AdamW, AdamWHyper, Optimizer, ParamSpec, StateDict};

/// Checks one input.
pub fn check(bytes: &[u8]) {
    let Ok(dict) = StateDict::from_safetensors(bytes) else { return };
    let again = dict.to_safetensors().expect("a parsed state can be written");
    let again = StateDict::from_safetensors(&again).expect("a written state can be read");
    // Compared as text, since NaN != NaN.
    assert_eq!(format!("{dict:?}"), format!("{again:?}"));
    for is_named in [false, true] {
        let mut optimizer =
            AdamW::with_one_group(AdamWHyper::default(), 2).expect("the defaults are valid");
        if is_named {
            let names = [ParamSpec::from("b"), ParamSpec::new("a", &[2, 3])];
            optimizer.set_param_names(&names).expect("two names for two tensors");
        }
        let before = optimizer.state_dict().expect("state on the host");
        if optimizer.load_state_dict(&dict).is_err() {
            assert_eq!(optimizer.state_dict().expect("state on the host"), before);
        }
    }
}
