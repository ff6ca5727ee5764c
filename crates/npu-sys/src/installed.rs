//! Which CANN a library is of, as its installer has written it down.
//!
//! CANN's installation guide, "File Paths", versions 8.0 and 8.5: the toolkit and nnrt record it in
//! `<home>/<arch>-linux/ascend_toolkit_install.info` and `ascend_nnrt_install.info`, nnae in
//! `<home>/ascend_nnae_install.info`. A line of theirs is `version=8.1.RC1`. Libraries lie below that home in
//! `lib64`, which may be a link to `<arch>-linux/lib64`, or `<package>/lib64`.

use std::env::consts::ARCH;
use std::fs::File;
use std::io::Read;
use std::path::Path;

/// The version of the CANN that a library lies in, if that is written down.
pub(crate) fn version_of(library: &Path) -> Option<String> {
    // Where it was found, and where it is if that is a link.
    let real = library.canonicalize().ok();
    let places = [Some(library), real.as_deref()].into_iter().flatten();
    places.flat_map(|file| file.ancestors().skip(1).take(ABOVE)).find_map(version_in)
}

/// What the installers' files in a folder say.
fn version_in(home: &Path) -> Option<String> {
    let folders = [home.join(format!("{ARCH}-linux")), home.to_owned()];
    let paths = folders.iter().flat_map(|folder| FILES.map(|name| folder.join(name)));
    let mut paths = paths.filter_map(|path| File::open(path).ok());
    paths.find_map(|file| {
        let mut text = Vec::new();
        file.take(MOST).read_to_end(&mut text).ok()?;
        let text = String::from_utf8_lossy(&text).into_owned();
        let version = text.lines().find_map(|line| line.strip_prefix("version="))?.trim();
        (!version.is_empty()).then(|| version.to_owned())
    })
}

const FILES: [&str; 3] =
    ["ascend_toolkit_install.info", "ascend_nnrt_install.info", "ascend_nnae_install.info"];

/// Of a library's path: its folder, a package's or an architecture's, the home.
const ABOVE: usize = 3;

/// Bytes that are read of a file; they have 300.
const MOST: u64 = 4096;
