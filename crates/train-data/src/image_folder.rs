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
        let mut classes: Vec<String> = Vec::new();
        for (name, path) in entries(&root)? {
            if path.is_dir() {
                classes.push(name);
            }
        }
        if classes.is_empty() {
            let root = root.display();
            return Err(Error::Input(format!("{root} has no folders; each class needs one")));
        }
        let mut files = Vec::new();
        for (label, class) in classes.iter().enumerate() {
            let mut folders = vec![root.join(class)];
            let mut all = Vec::new();
            while let Some(folder) = folders.pop() {
                for (_, path) in entries(&folder)? {
                    if path.is_dir() {
                        folders.push(path);
                    } else if is_image(&path)? {
                        all.push((folder.clone(), path));
                    }
                }
            }
            // Directories are compared by their whole path as text; `Path` compares component by
            // component.
            all.sort_by(|(a, a_file), (b, b_file)| {
                (a.as_os_str(), a_file.as_os_str()).cmp(&(b.as_os_str(), b_file.as_os_str()))
            });
            if all.is_empty() {
                let folder = root.join(class);
                let text = format!("{} has no JPEG or PNG file", folder.display());
                return Err(Error::Input(text));
            }
            files.extend(all.into_iter().map(|(_, path)| (path, label)));
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

/// Names and paths in a directory, sorted.
fn entries(folder: &Path) -> Result<Vec<(String, PathBuf)>> {
    let list = || {
        let mut all = Vec::new();
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            all.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
        all.sort();
        Ok(all)
    };
    list().map_err(|why: std::io::Error| Error::Input(format!("{}: {why}", folder.display())))
}

/// Returns whether a file has the extension of a JPEG or PNG.
fn is_image(path: &Path) -> Result<bool> {
    let extension = path.extension().unwrap_or_default().to_ascii_lowercase();
    match extension.to_str() {
        Some("jpg" | "jpeg" | "png") => Ok(true),
        // torchvision includes these; skipping them would change the indices of samples.
        Some("ppm" | "bmp" | "pgm" | "tif" | "tiff" | "webp") => {
            let text = format!("{}: only JPEG and PNG can be decoded", path.display());
            Err(Error::Input(text))
        }
        _ => Ok(false),
    }
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
        fs::rename(root.join("cat/1.webp"), root.join("cat/1.png")).unwrap();
        let images = ImageFolder::new(root).unwrap();
        let error = images.batch(&[0.into()]).unwrap_err().to_string();
        assert!(error.contains("sample 0: ") && error.contains("cat/1.png: not a JPEG"), "{error}");
        let error = ImageFolder::new(root.join("dog")).unwrap_err().to_string();
        assert!(error.contains("dog: "), "{error}");
    }
}
