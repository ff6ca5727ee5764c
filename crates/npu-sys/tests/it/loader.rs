//! Loading and probing with small libraries that have AscendCL's C interface and that the test
//! compiles. They test this crate, not CANN.

#![expect(unsafe_code, reason = "opens libraries the test made")]

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use npu_sys::sys::{Acl, Ops};
use npu_sys::{Attempt, Devices, Error, LoadError, Version, probe_with};
use tempfile::TempDir;

/// The functions of a working library that return values, one per line.
const WORKING: [&str; 5] = [
    "int aclInit(const char *config) { return config == 0 ? 0 : 100000; }",
    "int aclFinalize(void) { return 0; }",
    "int aclrtGetDeviceCount(unsigned *count) { *count = 8; return 0; }",
    "const char *aclrtGetSocName(void) { return \"Ascend910B2\"; }",
    "int aclrtGetVersion(int *a, int *b, int *c) { *a = 1; *b = 14; *c = 2; return 0; }",
];

/// Compiles a library of these functions with the system's C compiler.
fn library(folder: &TempDir, name: &str, functions: &[String]) -> PathBuf {
    let source = folder.path().join(format!("{name}.c"));
    fs::write(&source, functions.join("\n")).unwrap();
    let path = folder.path().join(format!("lib{name}.so"));
    let mut cc = Command::new("cc");
    cc.args(["-shared", "-fPIC", "-o"]).arg(&path).arg(&source);
    let output = cc.output().unwrap_or_else(|error| {
        panic!("these tests compile small C libraries and need `cc` in PATH: {error}")
    });
    assert!(output.status.success(), "cc: {}", String::from_utf8_lossy(&output.stderr));
    path
}

/// [`WORKING`] and, as functions that do nothing, all other required functions of AscendCL;
/// `symbol` is replaced or removed.
fn with(symbol: &str, replacement: Option<&str>) -> Vec<String> {
    let named = |function: &str, name: &str| function.contains(&format!("{name}("));
    let silent = Acl::SYMBOLS.iter().filter(|row| row.required).map(|row| row.name);
    let silent = silent.filter(|name| !WORKING.iter().any(|function| named(function, name)));
    let silent = silent.map(|name| format!("int {name}(void) {{ return 0; }}"));
    let mut functions: Vec<_> = WORKING.map(str::to_owned).into_iter().chain(silent).collect();
    functions.retain(|function| !named(function, symbol));
    functions.extend(replacement.map(str::to_owned));
    functions
}

/// A library with every required function.
fn working() -> Vec<String> {
    with("none", None)
}

fn open(paths: &[PathBuf]) -> Result<Acl, LoadError> {
    // SAFETY: the paths lead nowhere, to text, or to libraries made above with this interface.
    unsafe { Acl::open(paths) }
}

fn probe(name: &str, functions: &[String]) -> npu_sys::Result<Devices> {
    let folder = TempDir::new().unwrap();
    probe_with(&open(&[library(&folder, name, functions)])?)
}

#[test]
fn a_missing_library_is_an_error_with_every_path_and_what_to_install() {
    let folder = TempDir::new().unwrap();
    let text = folder.path().join("libascendcl.so");
    fs::write(&text, "not a library").unwrap();
    let missing = PathBuf::from("/nonexistent/lib64/libascendcl.so");
    let error = open(&[missing.clone(), text.clone()]).unwrap_err();
    let LoadError::NotFound { library, tried } = &error else { panic!("{error}") };
    assert_eq!(library, "libascendcl.so");
    assert_eq!(tried.iter().map(|a| &a.path).collect::<Vec<_>>(), [&missing, &text]);
    assert!(tried.iter().all(|Attempt { reason, .. }| !reason.is_empty()));
    let message = error.to_string();
    for part in ["/nonexistent/lib64", "No such file", "CANN toolkit", "ASCEND_HOME_PATH"] {
        assert!(message.contains(part), "{part}: {message}");
    }
    assert!(matches!(open(&[]), Err(LoadError::NotFound { tried, .. }) if tried.is_empty()));
}

#[test]
fn a_path_with_nul_is_an_error() {
    let error = open(&[Path::new("lib\0.so").to_owned()]).unwrap_err();
    assert!(error.to_string().contains("zero element"), "{error}");
}

#[test]
fn a_missing_function_is_an_error_that_names_it() {
    for row in Acl::SYMBOLS.iter().filter(|row| row.required) {
        let symbol = row.name;
        let error = probe(&format!("no_{symbol}"), &with(symbol, None)).unwrap_err();
        let Error::Load(LoadError::MissingSymbol { symbol: named, libraries, found }) = &error
        else {
            panic!("{error}")
        };
        assert_eq!((*named, found), (symbol, &None));
        assert_eq!(libraries.len(), 1);
        assert!(libraries[0].to_string_lossy().contains("no_acl"));
        let message = error.to_string();
        assert!(message.contains(symbol) && message.contains("CANN 8.1"), "{message}");
    }
}

#[test]
fn probe_returns_devices_chip_and_version() {
    let version = Version { major: 1, minor: 14, patch: 2 };
    let expected = Devices { count: 8, soc: Some("Ascend910B2".into()), version };
    let found = probe("working", &working()).unwrap();
    assert_eq!(found, expected);
    assert_eq!(found.to_string(), "8 x Ascend910B2, AscendCL 1.14.2");
}

#[test]
fn the_first_library_that_opens_is_used() {
    let folder = TempDir::new().unwrap();
    let working = library(&folder, "second", &working());
    let acl = open(&[folder.path().join("libfirst.so"), working]).unwrap();
    assert_eq!(probe_with(&acl).unwrap().count, 8);
    // SAFETY: nothing of this library is used afterwards.
    unsafe { npu_sys::finalize(&acl) }.unwrap();
}

#[test]
fn each_function_comes_from_the_first_library_that_has_it() {
    let folder = TempDir::new().unwrap();
    let count = "int aclrtGetDeviceCount(unsigned *count) { *count = 3; return 0; }";
    let first = library(&folder, "first", &[count.to_owned()]);
    let second = library(&folder, "second", &working());
    assert_eq!(probe_with(&open(&[first.clone(), second.clone()]).unwrap()).unwrap().count, 3);
    assert_eq!(probe_with(&open(&[second, first.clone()]).unwrap()).unwrap().count, 8);
    let Err(LoadError::MissingSymbol { libraries, symbol, .. }) =
        open(std::slice::from_ref(&first))
    else {
        panic!("the first library alone has one function")
    };
    assert_eq!((libraries, symbol), (vec![first], "aclInit"));
}

/// With the folders of the installers of CANN 8.1 (toolkit), nnrt and nnae.
#[test]
fn an_error_names_the_installed_and_the_required_version() {
    let arch = format!("{}-linux", std::env::consts::ARCH);
    let folder = TempDir::new().unwrap();
    let old = library(&folder, "old", &with("aclrtGetSocName", None));
    let home = folder.path().join("8.0.RC3");
    let text = "package_name=Ascend-cann-toolkit\nversion=8.0.RC3\ninnerversion=V100R001C19\n";
    for (at, file) in [
        ("lib64", format!("{arch}/ascend_toolkit_install.info")),
        ("runtime/lib64", format!("{arch}/ascend_nnrt_install.info")),
        (&format!("{arch}/lib64"), format!("{arch}/ascend_toolkit_install.info")),
        ("lib64", "ascend_nnae_install.info".into()),
    ] {
        let path = home.join(at).join("libascendcl.so");
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::create_dir_all(home.join(&arch)).unwrap();
        fs::copy(&old, &path).unwrap();
        let refused = || open(std::slice::from_ref(&path)).unwrap_err().to_string();
        let shown = path.display();
        let plain = format!("{shown} has no function aclrtGetSocName; CANN 8.1 has it");
        assert_eq!(refused(), plain);
        let expected =
            format!("CANN 8.0.RC3 ({shown}) has no function aclrtGetSocName; CANN 8.1 has it");
        fs::write(home.join(&file), text).unwrap();
        assert_eq!(refused(), expected);
        // `latest` and other links are followed.
        let link = folder.path().join("libascendcl.so");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        let through = open(std::slice::from_ref(&link)).unwrap_err().to_string();
        assert!(through.starts_with("CANN 8.0.RC3 ("), "{through}");
        // An unreadable file is ignored.
        for broken in ["", "version=", "innerversion=7\n", "\u{0}\u{fffd}"] {
            fs::write(home.join(&file), broken).unwrap();
            assert_eq!(refused(), plain);
        }
        fs::write(home.join(&file), "x".repeat(5000) + "\nversion=1\n").unwrap();
        assert_eq!(refused(), plain);
        fs::remove_file(home.join(&file)).unwrap();
        fs::create_dir(home.join(&file)).unwrap();
        assert_eq!(refused(), plain);
        fs::remove_file(link).unwrap();
        fs::remove_dir_all(&home).unwrap();
    }
}

#[test]
fn a_missing_optional_function_is_an_error_of_the_call() {
    let folder = TempDir::new().unwrap();
    let acl = open(&[library(&folder, "working", &working())]).unwrap();
    // SAFETY: no such function is in the library, so nothing is called.
    let error = unsafe { acl.aclrtSetOpWaitTimeout(3) }.unwrap_err();
    let shown = folder.path().join("libworking.so").display().to_string();
    let text = "has no function aclrtSetOpWaitTimeout; CANN 8.1 has it";
    assert_eq!(error.to_string(), format!("{shown} {text}"));
    fs::write(folder.path().join("ascend_nnae_install.info"), "version=8.0.0\n").unwrap();
    let acl = open(&[shown.clone().into()]).unwrap();
    // SAFETY: as above.
    let error = unsafe { acl.aclrtSetOpWaitTimeout(3) }.unwrap_err();
    assert_eq!(error.to_string(), format!("CANN 8.0.0 ({shown}) {text}"));
    // SAFETY: an empty table.
    let ops = unsafe { Ops::from_symbols(&|_| None) }.unwrap();
    assert!(!ops.has("aclnnInplaceMuls"));
    // SAFETY: as above.
    let error = unsafe { ops.aclnnInplaceZero(std::ptr::null_mut()) }.unwrap_err();
    let text =
        "the installed CANN has no function aclnnInplaceZeroGetWorkspaceSize; CANN 8.1 has it";
    assert_eq!(error.to_string(), text);
    let (list, one) = (std::ptr::null(), std::ptr::null());
    // SAFETY: as above.
    let error = unsafe { ops.aclnnForeachNonFiniteCheckAndUnscale(list, one, one) }.unwrap_err();
    assert!(error.to_string().ends_with("; CANN 8.5 has it"), "{error}");
    // SAFETY: as above.
    let error = unsafe {
        let (decay, momentum, lr) = (0.0, 0.9, 0.1);
        ops.aclnnFusedSgd(list, list, list, one, decay, momentum, lr, 0.0, false, false, true)
    }
    .unwrap_err();
    let text = "the installed CANN has no function aclnnFusedSgdGetWorkspaceSize; CANN 9.1 has it";
    assert_eq!(error.to_string(), text);
}

#[test]
fn probe_accepts_an_initialized_library_and_a_chip_without_a_name() {
    let again = with("aclInit", Some("int aclInit(const char *c) { return 100002; }"));
    assert_eq!(probe("again", &again).unwrap().count, 8);
    let nameless = with("aclrtGetSocName", Some("const char *aclrtGetSocName(void) { return 0; }"));
    let found = probe("nameless", &nameless).unwrap();
    assert_eq!(found.to_string(), "8 x unnamed NPU, AscendCL 1.14.2");
}

#[test]
fn errors_name_the_function_and_the_status() {
    let count = "int aclrtGetDeviceCount(unsigned *count) { return 507899; }";
    let error = probe("count", &with("aclrtGetDeviceCount", Some(count))).unwrap_err();
    let text = "aclrtGetDeviceCount failed: ACL_ERROR_RT_DRV_INTERNAL_ERROR (507899)";
    assert_eq!(error.to_string(), text);
    let init = "int aclInit(const char *c) { return -7; }";
    let error = probe("init", &with("aclInit", Some(init))).unwrap_err();
    assert_eq!(error.to_string(), "aclInit failed: aclError -7");
    let version = "int aclrtGetVersion(int *a, int *b, int *c) { return 107000; }";
    let error = probe("version", &with("aclrtGetVersion", Some(version))).unwrap_err();
    let Error::Status { function, status } = error else { panic!("{error}") };
    assert_eq!((function, status.code()), ("aclrtGetVersion", 107_000));
}

#[test]
fn global_returns_the_same_at_every_call() {
    // With or without CANN.
    let text = || npu_sys::probe().map(|found| found.to_string()).map_err(|e| e.to_string());
    assert_eq!(text(), text());
}
