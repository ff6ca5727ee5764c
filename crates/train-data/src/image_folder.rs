//! `ImageFolder`: JPEG and PNG files with their directory as class.
//!
//! Follows: torchvision 0.29, `datasets/folder.py`.

use std::fs;
use std::path::{Path, PathBuf};

use crate::transforms::decode;
use crate::{Array, BoxError, Dataset, Error, Result, Sample, SampleRng};

/// Images below `root/CLASS`, at any depth: `inputs`, bytes `[3, height, width]`, and `labels`, the
/// class index.
///
/// Classes are numbered in the order of their names, and samples are sorted by class, directory and
/// name, as in torchvision's `ImageFolder`. Images are read and decoded on request; to be batched,
/// a pipeline must make their sizes equal ([`Transformed`](crate::transforms::Transformed)).
///
/// It differs from torchvision's where that would train on something else than the images:
///
/// * Directories whose name begins with a dot, such as `.ipynb_checkpoints`, are left out.
///   torchvision numbers them as classes, which shifts the labels of all others.
/// * Files whose name begins with `._`, which macOS adds beside images, are left out: they are not
///   images.
/// * Links to directories are followed, but not one to a directory that the link is in: torchvision
///   lists each image some forty times then.
/// * Images in the other formats that torchvision lists are an error.
///
/// Files with other extensions (`.gif`, `.avif`, `.heic`) are left out, as in torchvision.
#[derive(Debug)]
pub struct ImageFolder {
    root: PathBuf,
    classes: Vec<String>,
    files: Vec<(PathBuf, usize)>,
}

impl ImageFolder {
    /// Lists the files.
    ///
    /// # Errors
    ///
    /// [`Error::Input`] for a directory that cannot be read or has no subdirectories, a class
    /// without images, or an image in a format other than JPEG and PNG.
    pub fn new(root: impl Into<PathBuf>) -> Result<Self> {
        let root = root.into();
        let reached = [real_path(&root)?];
        let mut classes: Vec<String> = Vec::new();
        let mut files = Vec::new();
        for entry in entries(&root)? {
            let Some(folder) = entry.folder(&reached)? else { continue };
            let mut all = images_below(folder)?;
            if all.is_empty() {
                let text = format!("{} has no JPEG or PNG file", entry.path.display());
                return Err(Error::Input(text));
            }
            // Directories are compared by their whole path as text; `Path` compares component by
            // component.
            all.sort_by(|(a, a_file), (b, b_file)| {
                (a.as_os_str(), a_file.as_os_str()).cmp(&(b.as_os_str(), b_file.as_os_str()))
            });
            files.extend(all.into_iter().map(|(_, path)| (path, classes.len())));
            classes.push(entry.name);
        }
        if classes.is_empty() {
            let root = root.display();
            return Err(Error::Input(format!("{root} has no folders; each class needs one")));
        }
        Ok(Self { root, classes, files })
    }

    /// Names of the classes, by index.
    #[must_use]
    pub fn classes(&self) -> &[String] {
        &self.classes
    }

    /// File and class of each sample.
    pub fn files(&self) -> impl ExactSizeIterator<Item = (&Path, usize)> {
        self.files.iter().map(|(path, label)| (path.as_path(), *label))
    }
}

impl Dataset for ImageFolder {
    fn name(&self) -> &str {
        self.root.to_str().unwrap_or("ImageFolder")
    }

    fn len(&self) -> usize {
        self.files.len()
    }

    fn sample(&self, index: usize, _: &mut SampleRng) -> Result<Sample, BoxError> {
        let Some((path, label)) = self.files.get(index) else {
            return Err(format!("there are {} images", self.files.len()).into());
        };
        let read = || decode(&fs::read(path)?);
        let image = read().map_err(|why| format!("{}: {why}", path.display()))?;
        Ok(Sample::new().with("inputs", image).with("labels", Array::scalar(*label as i64)))
    }
}

/// A name in a directory.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Entry {
    name: String,
    path: PathBuf,
}

/// A directory to list.
struct Folder {
    path: PathBuf,
    /// Paths without links of the directories that it was reached through, and its own.
    reached: Vec<PathBuf>,
}

impl Entry {
    /// Returns the directory, if this is one to be listed.
    fn folder(&self, reached: &[PathBuf]) -> Result<Option<Folder>> {
        if self.name.starts_with('.') || !self.path.is_dir() {
            return Ok(None);
        }
        let real = real_path(&self.path)?;
        // A link to a directory that it is in has no end.
        if reached.iter().any(|outer| outer.starts_with(&real)) {
            return Ok(None);
        }
        let reached = [reached, &[real]].concat();
        Ok(Some(Folder { path: self.path.clone(), reached }))
    }
}

/// Lists directory and path of each image below a directory.
fn images_below(folder: Folder) -> Result<Vec<(PathBuf, PathBuf)>> {
    let mut all = Vec::new();
    let mut folders = vec![folder];
    while let Some(Folder { path, reached }) = folders.pop() {
        for entry in entries(&path)? {
            let found = fs::metadata(&entry.path);
            if found.as_ref().is_ok_and(fs::Metadata::is_dir) {
                folders.extend(entry.folder(&reached)?);
            } else if is_image(&entry)? {
                // A link without a target is named when the sample is read.
                if found.is_ok_and(|found| !found.is_file()) {
                    return Err(Error::Input(format!("{} is not a file", entry.path.display())));
                }
                all.push((path.clone(), entry.path));
            }
        }
    }
    Ok(all)
}

/// Entries of a directory, sorted by name.
fn entries(folder: &Path) -> Result<Vec<Entry>> {
    let list = || {
        let mut all = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let name = entry.file_name().to_string_lossy().into_owned();
            all.push(Entry { name, path: entry.path() });
        }
        all.sort();
        Ok(all)
    };
    list().map_err(|why| unreadable(folder, &why))
}

fn real_path(folder: &Path) -> Result<PathBuf> {
    folder.canonicalize().map_err(|why| unreadable(folder, &why))
}

fn unreadable(folder: &Path, why: &std::io::Error) -> Error {
    Error::Input(format!("{}: {why}", folder.display()))
}

/// Returns whether a file has the extension of a JPEG or PNG. As in torchvision, this may be its
/// whole name.
fn is_image(file: &Entry) -> Result<bool> {
    let name = file.name.to_ascii_lowercase();
    let ends_with = |extensions: &[&str]| extensions.iter().any(|end| name.ends_with(end));
    if name.starts_with("._") {
        return Ok(false);
    }
    // torchvision includes these; skipping them would change the indices of samples.
    if ends_with(&[".ppm", ".bmp", ".pgm", ".tif", ".tiff", ".webp"]) {
        let text = format!("{}: only JPEG and PNG can be decoded", file.path.display());
        return Err(Error::Input(text));
    }
    Ok(ends_with(&[".jpg", ".jpeg", ".png"]))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Draw;

    fn write(path: &Path) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        image::RgbImage::from_pixel(3, 2, image::Rgb([1, 2, 3])).save(path).unwrap();
    }

    #[test]
    fn files_are_in_torchvisions_order() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        // Order of `torchvision.datasets.ImageFolder(root).samples`.
        let ordered = [
            "B/z.png",
            "a/1.JPG",
            "a/b.png",
            "a/b/0.jpeg",
            "a/b/10.png",
            "a/b/9.png",
            "a/b-c/1.png",
            "a/b/scans.tif/1.png",
            "a/b/x/1.png",
            "c/x.png",
        ];
        for name in ordered.iter().rev() {
            write(&root.join(name));
        }
        fs::write(root.join("a/notes.txt"), "").unwrap();
        fs::write(root.join("beside.png"), "").unwrap();
        let images = ImageFolder::new(root).unwrap();
        assert_eq!(images.classes(), ["B", "a", "c"]);
        let files: Vec<_> =
            images.files().map(|(path, _)| path.strip_prefix(root).unwrap()).collect();
        assert_eq!(files, ordered.map(Path::new));
        let labels: Vec<_> = images.files().map(|(_, label)| label).collect();
        assert_eq!(labels, [0, 1, 1, 1, 1, 1, 1, 1, 1, 2]);
        let sample = images.sample(9, &mut Draw::from(9).random()).unwrap();
        assert_eq!(*sample.get("labels").unwrap(), Array::scalar(2_i64));
        let planes = [[1_u8; 6], [2; 6], [3; 6]].concat();
        assert_eq!(*sample.get("inputs").unwrap(), Array::new([3, 2, 3], planes).unwrap());
    }

    fn listed(root: &Path) -> Vec<String> {
        let images = ImageFolder::new(root).unwrap();
        let name = |(path, label): (&Path, usize)| {
            format!("{label}: {}", path.strip_prefix(root).unwrap().display())
        };
        images.files().map(name).collect()
    }

    #[test]
    fn hidden_folders_are_neither_classes_nor_searched() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        for name in [".ipynb_checkpoints/1.png", "cat/1.png", "cat/.ipynb_checkpoints/1.png"] {
            write(&root.join(name));
        }
        // As in torchvision, a file may be hidden, or have an extension alone.
        for name in ["cat/.png", "cat/.2.png", "dog/1.png"] {
            write(&root.join("cat/1.png"));
            fs::create_dir_all(root.join(name).parent().unwrap()).unwrap();
            fs::copy(root.join("cat/1.png"), root.join(name)).unwrap();
        }
        // macOS writes these beside images.
        fs::write(root.join("cat/._1.png"), "Mac OS X").unwrap();
        fs::write(root.join("cat/._1.tiff"), "Mac OS X").unwrap();
        assert_eq!(ImageFolder::new(root).unwrap().classes(), ["cat", "dog"]);
        let expected = ["0: cat/.2.png", "0: cat/.png", "0: cat/1.png", "1: dog/1.png"];
        assert_eq!(listed(root), expected);
        fs::create_dir(root.join("empty")).unwrap();
        fs::rename(root.join("cat"), root.join(".cat")).unwrap();
        fs::remove_dir_all(root.join("dog")).unwrap();
        fs::remove_dir(root.join("empty")).unwrap();
        let error = ImageFolder::new(root).unwrap_err().to_string();
        assert!(error.contains("has no folders"), "{error}");
    }

    #[test]
    #[cfg(unix)]
    fn links_are_followed_but_not_in_circles() {
        use std::os::unix::fs::symlink;

        let dir = tempfile::tempdir().unwrap();
        let root = &dir.path().join("root");
        for name in ["cat/1.png", "cat/in/2.png", "dog/3.png"] {
            write(&root.join(name));
        }
        write(&dir.path().join("elsewhere/4.png"));
        let expected = ["0: cat/1.png", "0: cat/in/2.png", "1: dog/3.png"];
        for (link, to) in [
            ("cat/up", ".."),
            ("cat/self", "."),
            ("cat/in/far", "../../.."),
            ("self", "."),
            ("cat/whole", "/"),
        ] {
            symlink(to, root.join(link)).unwrap();
            assert_eq!(listed(root), expected, "{link}");
            fs::remove_file(root.join(link)).unwrap();
        }
        // Two classes that link to each other.
        symlink("../dog", root.join("cat/dog")).unwrap();
        symlink("../cat", root.join("dog/cat")).unwrap();
        let expected = [
            "0: cat/1.png",
            "0: cat/dog/3.png",
            "0: cat/in/2.png",
            "1: dog/3.png",
            "1: dog/cat/1.png",
            "1: dog/cat/in/2.png",
        ];
        assert_eq!(listed(root), expected);
        fs::remove_file(root.join("cat/dog")).unwrap();
        fs::remove_file(root.join("dog/cat")).unwrap();
        // A folder from elsewhere is a class, twice if there are two links.
        for link in ["b", "c"] {
            symlink("../elsewhere", root.join(link)).unwrap();
        }
        let expected =
            ["0: b/4.png", "1: c/4.png", "2: cat/1.png", "2: cat/in/2.png", "3: dog/3.png"];
        assert_eq!(listed(root), expected);
    }

    #[test]
    fn a_folder_without_images_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let error = || ImageFolder::new(root).unwrap_err().to_string();
        assert!(error().contains("has no folders"), "{}", error());
        fs::create_dir(root.join("cat")).unwrap();
        assert!(error().contains("cat has no JPEG or PNG file"), "{}", error());
        fs::write(root.join("cat/1.webp"), "").unwrap();
        assert!(error().contains("1.webp: only JPEG"), "{}", error());
        // Reading a pipe would wait for one who writes.
        let pipe = std::process::Command::new("mkfifo").arg(root.join("cat/0.png")).status();
        assert!(pipe.unwrap().success());
        fs::rename(root.join("cat/1.webp"), root.join("cat/1.png")).unwrap();
        assert!(error().contains("cat/0.png is not a file"), "{}", error());
        fs::remove_file(root.join("cat/0.png")).unwrap();
        let images = ImageFolder::new(root).unwrap();
        let error = images.batch(&[0.into()]).unwrap_err().to_string();
        assert!(error.contains("sample 0: ") && error.contains("cat/1.png: not a JPEG"), "{error}");
        let error = ImageFolder::new(root.join("dog")).unwrap_err().to_string();
        assert!(error.contains("dog: "), "{error}");
    }
}
