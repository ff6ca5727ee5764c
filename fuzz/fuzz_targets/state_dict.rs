//! Arbitrary bytes as an optimizer's saved state.
//!
//! Checked: what is read can be written and read again to the same state, and loading it into an
//! optimizer either works or changes nothing.

#![no_main]

use fused_optim::{AdamW, AdamWHyper, Optimizer, ParamSpec, StateDict};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    let Ok(dict) = StateDict::from_safetensors(bytes) else { return };
    let again = dict.to_safetensors().expect("what was read can be written");
    let again = StateDict::from_safetensors(&again).expect("and read again");
    // NaNs are not equal to themselves; their text is.
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
});
