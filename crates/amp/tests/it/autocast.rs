//! Autocast: every operator's rule compared with PyTorch's registrations, and the casts of each
//! rule.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use amp::{Autocast, Cast, CastRule, DType, Error};
use serde::Deserialize;

#[derive(Deserialize)]
struct Registered {
    default_dtype: BTreeMap<String, String>,
    cuda: BTreeMap<String, String>,
    cpu: BTreeMap<String, String>,
}

const CATEGORIES: [(&str, CastRule); 6] = [
    ("lower_precision_fp", CastRule::LowerPrecisionFp),
    ("fp32", CastRule::Fp32),
    ("fp32_set_opt_dtype", CastRule::Fp32SetOptDtype),
    ("fp32_append_dtype", CastRule::Fp32AppendDtype),
    ("promote", CastRule::Promote),
    ("banned", CastRule::Banned),
];

fn bare(name: &str) -> &str {
    name.split('.').next().unwrap()
}

#[test]
fn rules_equal_pytorchs_registrations() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vectors/autocast_policy.json");
    let text = std::fs::read(path).unwrap();
    let registered: Registered = serde_json::from_slice(&text).unwrap();
    let devices = [
        (Autocast::cuda(), registered.cuda, "cuda", 119),
        (Autocast::cpu(), registered.cpu, "cpu", 126),
    ];
    for (ours, theirs, device, count) in devices {
        assert_eq!(theirs.len(), count);
        for (name, category) in &theirs {
            let rule = CATEGORIES.iter().find(|one| one.0 == category).unwrap().1;
            assert_eq!(ours.rule(name), Some(rule), "{device} {name}");
            assert_eq!(ours.rule(bare(name)), Some(rule), "{device} {name}");
        }
        let names: BTreeSet<&str> = theirs.keys().flat_map(|name| [name, bare(name)]).collect();
        assert_eq!(ours.rules().map(|one| one.0).collect::<BTreeSet<_>>(), names);
        let dtype = [("float16", DType::F16), ("bfloat16", DType::Bf16)]
            .into_iter()
            .find(|one| one.0 == registered.default_dtype[device]);
        assert_eq!(ours.dtype(), dtype.unwrap().1);
    }
}

#[test]
fn each_rule_casts_as_in_pytorch() {
    let cuda = Autocast::cuda();
    use DType::{Bf16, F16, F32, F64};
    for (op, inputs, cast) in [
        ("conv2d", &[F32, F32][..], Cast::Inputs(F16)),
        ("exp", &[F16], Cast::Inputs(F32)),
        ("softmax", &[F16], Cast::Output(F32)),
        ("softmax.int", &[F64], Cast::Keep),
        ("norm.Scalar", &[F16], Cast::Output(F32)),
        ("sum", &[], Cast::Keep),
        ("dot", &[F16, F16], Cast::Inputs(F16)),
        ("dot", &[F16, F32], Cast::Inputs(F32)),
        ("dot", &[F16, F64], Cast::Inputs(F16)),
        ("dot", &[F16, Bf16], Cast::Inputs(F32)),
        ("relu", &[F16], Cast::Keep),
        ("softmax.Dimname", &[F16], Cast::Keep),
        ("", &[F16], Cast::Keep),
    ] {
        assert_eq!(cuda.cast(op, inputs), Ok(cast), "{op} {inputs:?}");
    }
    assert_eq!([F16, Bf16, F32, F64].map(|x| Cast::Inputs(F16).input(x)), [F16, F16, F16, F64]);
    assert_eq!([F16, F64].map(|x| Cast::Output(F32).input(x)), [F16, F64]);
    let banned = Error::Banned { op: "binary_cross_entropy".into() };
    assert_eq!(cuda.cast("binary_cross_entropy", &[F16]), Err(banned));

    let cpu = Autocast::cpu();
    assert_eq!(cpu.cast("conv2d", &[F32]), Ok(Cast::Inputs(Bf16)));
    assert_eq!(cpu.with_f16().cast("conv2d", &[F32]), Ok(Cast::Inputs(F16)));
    assert_eq!(cuda.with_bf16().cast("dot", &[Bf16]), Ok(Cast::Inputs(Bf16)));
}

#[test]
fn nested_regions_and_custom_rules_do_not_change_the_outer_value() {
    let outer = Autocast::cuda();
    let off = outer.clone().with_enabled(false);
    let again = off.clone().with_enabled(true);
    for op in ["linear", "exp", "sum", "dot", "binary_cross_entropy"] {
        assert_eq!(off.cast(op, &[DType::F32]), Ok(Cast::Keep), "{op}");
        assert_eq!(again.cast(op, &[DType::F32]), outer.cast(op, &[DType::F32]), "{op}");
    }
    let own = outer.clone().with_rule("pow", CastRule::Promote).without_rule("softmax");
    for overload in ["pow", "pow.Scalar", "pow.Tensor_Scalar", "pow.Tensor_Tensor"] {
        assert_eq!(own.rule(overload), Some(CastRule::Promote), "{overload}");
        assert_eq!(outer.rule(overload), Some(CastRule::Fp32), "{overload}");
    }
    assert_eq!((own.rule("softmax"), own.rule("softmax.int")), (None, None));
    let one = outer.with_rule("sum.dim_IntList", CastRule::Fp32);
    assert_eq!(one.rule("sum.dim_IntList"), Some(CastRule::Fp32));
    assert_eq!(one.rule("sum"), Some(CastRule::Fp32SetOptDtype));
}

#[test]
fn the_lower_precision_is_chosen_by_a_value() {
    use DType::{Bf16, F16, F32, F64};

    assert_eq!(Autocast::cpu().with_dtype(F16).unwrap(), Autocast::cpu().with_f16());
    assert_eq!(Autocast::cuda().with_dtype(Bf16).unwrap(), Autocast::cuda().with_bf16());
    for dtype in [F32, F64] {
        let error = Autocast::cpu().with_dtype(dtype).unwrap_err();
        assert_eq!(error, Error::LowerPrecision { dtype });
        assert!(error.to_string().contains(&format!("to {dtype}: use f16 or bf16")), "{error}");
    }
}
