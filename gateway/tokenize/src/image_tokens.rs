//! Number of tokens that a model has for an image, by the image processors of transformers 5.19.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;

/// Tokens of an image if the model's rule or the image's size is unknown: about that of 1,000 × 800 pixels in Qwen2.5-VL.
const DEFAULT_IMAGE_TOKENS: u32 = 1_000;
/// Maximum size of a configuration file in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Largest ratio of the sides of an image that processors of the Qwen family accept.
const MAX_ASPECT_RATIO: f64 = 200.0;

/// How many tokens an image has.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ImageTokenRule {
    /// As many for each image: Gemma 3, LLaVA 1.5.
    Fixed(u32),
    /// One per square of this side, after the image was scaled to a number of pixels: Qwen2-VL, Qwen2.5-VL, Qwen3-VL.
    Squares {
        /// Side of the square in pixels: that of a patch, times the number of patches that are merged.
        side: u32,
        /// Smallest number of pixels.
        min_pixels: u32,
        /// Largest number of pixels.
        max_pixels: u32,
    },
    /// The default for each image.
    Unknown,
}

/// The members of preprocessor_config.json that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ProcessorConfig {
    image_processor_type: Option<String>,
    patch_size: Option<Value>,
    merge_size: Option<u32>,
    min_pixels: Option<u32>,
    max_pixels: Option<u32>,
    size: Option<Value>,
}

/// The file of newer models, with one member per modality.
#[derive(Debug, Deserialize)]
struct JointProcessorConfig {
    image_processor: ProcessorConfig,
}

/// The members of config.json that are used.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct ModelConfig {
    model_type: Option<String>,
    mm_tokens_per_image: Option<u32>,
    vision_soft_tokens_per_image: Option<u32>,
    vision_config: VisionConfig,
}

#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct VisionConfig {
    model_type: Option<String>,
    image_size: Option<u32>,
    patch_size: Option<u32>,
}

impl ImageTokenRule {
    /// The rule of the model in a folder, by its preprocessor_config.json (or processor_config.json) and config.json. A file that is missing
    /// or different leaves the rule unknown.
    #[must_use]
    pub fn load(folder: &Path) -> ImageTokenRule {
        let processor = read(folder, "preprocessor_config.json").or_else(|| {
            let joint: JointProcessorConfig = read(folder, "processor_config.json")?;
            Some(joint.image_processor)
        });
        let of_processor = processor.and_then(|processor| processor.squares());
        let rule = of_processor.or_else(|| read::<ModelConfig>(folder, "config.json")?.fixed());
        rule.unwrap_or(ImageTokenRule::Unknown)
    }

    /// Tokens of an image of this width and height in pixels, if they are known.
    #[must_use]
    pub fn tokens(self, size: Option<(u32, u32)>) -> u32 {
        match (self, size) {
            (ImageTokenRule::Fixed(tokens), _) => tokens,
            (ImageTokenRule::Squares { side, min_pixels, max_pixels }, Some((width, height))) => {
                let pixels = PixelRange { min: min_pixels.into(), max: max_pixels.into() };
                squares(width.into(), height.into(), side.into(), pixels).unwrap_or(DEFAULT_IMAGE_TOKENS)
            }
            (ImageTokenRule::Squares { side, max_pixels, .. }, None) => {
                let largest = max_pixels / side.saturating_mul(side).max(1);
                DEFAULT_IMAGE_TOKENS.min(largest.max(1))
            }
            (ImageTokenRule::Unknown, _) => DEFAULT_IMAGE_TOKENS,
        }
    }
}

impl ProcessorConfig {
    fn squares(&self) -> Option<ImageTokenRule> {
        if !self.image_processor_type.as_ref()?.starts_with("Qwen2VLImageProcessor") {
            return None;
        }
        let edge = |name: &str| {
            let edge = self.size.as_ref()?.get(name)?.as_u64()?;
            u32::try_from(edge).ok()
        };
        let patch = self.patch_size.as_ref().and_then(Value::as_u64).unwrap_or(14);
        let side = u32::try_from(patch).ok()?.checked_mul(self.merge_size.unwrap_or(2))?;
        (side > 0).then_some(ImageTokenRule::Squares {
            side,
            min_pixels: self.min_pixels.or_else(|| edge("shortest_edge")).unwrap_or(56 * 56),
            max_pixels: self.max_pixels.or_else(|| edge("longest_edge")).unwrap_or(28 * 28 * 1280),
        })
    }
}

impl ModelConfig {
    fn fixed(&self) -> Option<ImageTokenRule> {
        let tokens = match self.model_type.as_deref()? {
            "gemma3" => self.mm_tokens_per_image.unwrap_or(256),
            "gemma3n" => self.vision_soft_tokens_per_image.unwrap_or(256),
            // Other vision models of this type have no fixed number.
            "llava" if self.vision_config.model_type.as_deref() == Some("clip_vision_model") => {
                let per_side = self.vision_config.image_size.unwrap_or(336)
                    / self.vision_config.patch_size.unwrap_or(14).max(1);
                per_side.checked_mul(per_side)?
            }
            _ => return None,
        };
        Some(ImageTokenRule::Fixed(tokens))
    }
}

#[derive(Debug, Clone, Copy)]
struct PixelRange {
    min: f64,
    max: f64,
}

/// Squares of an image that was scaled to the range: `smart_resize` of transformers. `None` for an image that it rejects.
fn squares(width: f64, height: f64, side: f64, pixels: PixelRange) -> Option<u32> {
    if width < 1.0 || height < 1.0 || width.max(height) / width.min(height) > MAX_ASPECT_RATIO {
        return None;
    }
    let (mut columns, mut rows) = ((width / side).round_ties_even(), (height / side).round_ties_even());
    let scaled = columns * side * rows * side;
    if scaled > pixels.max {
        let scale = (width * height / pixels.max).sqrt();
        columns = (width / scale / side).floor().max(1.0);
        rows = (height / scale / side).floor().max(1.0);
    } else if scaled < pixels.min {
        let scale = (pixels.min / (width * height)).sqrt();
        columns = (width * scale / side).ceil();
        rows = (height * scale / side).ceil();
    }
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a cast from float saturates"
    )]
    Some((columns * rows) as u32)
}

/// A configuration file; `None` if it is missing, too large or of another shape.
fn read<T: serde::de::DeserializeOwned>(folder: &Path, name: &str) -> Option<T> {
    let mut text = Vec::new();
    File::open(folder.join(name)).ok()?.take(MAX_FILE_BYTES).read_to_end(&mut text).ok()?;
    serde_json::from_slice(&text).ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Width, height, and the tokens that transformers computes for them with the configurations of Qwen2.5-VL, of the processor's defaults,
    /// and of Qwen3-VL. `None`: it rejects the image.
    const RECORDED: [(u32, u32, Option<[u32; 3]>); 14] = [
        (640, 480, Some([391, 391, 300])),
        (1024, 1024, Some([1369, 1225, 1024])),
        (1920, 1080, Some([2691, 1222, 2040])),
        (1080, 1920, Some([2691, 1222, 2040])),
        (224, 224, Some([64, 64, 64])),
        (32, 32, Some([4, 4, 64])),
        (1, 1, Some([4, 4, 64])),
        (10, 1900, Some([28, 28, 111])),
        (3840, 2160, Some([10549, 1222, 8160])),
        (8000, 6000, Some([16170, 1230, 16170])),
        (300, 42, Some([22, 22, 66])),
        (1400, 70, Some([100, 100, 88])),
        (16000, 100, Some([2284, 904, 1500])),
        (20100, 100, None),
    ];

    fn rule(files: &[(&str, &str)]) -> ImageTokenRule {
        let folder = tempfile::tempdir().unwrap();
        for (name, text) in files {
            std::fs::write(folder.path().join(name), text).unwrap();
        }
        ImageTokenRule::load(folder.path())
    }

    #[test]
    fn tokens_of_the_qwen_family_are_those_of_transformers() {
        let qwen2 = r#"{"image_processor_type":"Qwen2VLImageProcessor","min_pixels":3136,"max_pixels":12845056,"patch_size":14,"merge_size":2,
            "size":{"longest_edge":12845056,"shortest_edge":3136}}"#;
        let default = r#"{"image_processor_type":"Qwen2VLImageProcessorFast"}"#;
        let qwen3 = r#"{"size":{"longest_edge":16777216,"shortest_edge":65536},"patch_size":16,"temporal_patch_size":2,"merge_size":2,
            "image_processor_type":"Qwen2VLImageProcessorFast"}"#;
        let rules = [
            rule(&[("preprocessor_config.json", qwen2)]),
            rule(&[("preprocessor_config.json", default)]),
            rule(&[("processor_config.json", &format!(r#"{{"image_processor":{qwen3}}}"#))]),
        ];
        for (width, height, recorded) in RECORDED {
            let expected = recorded.unwrap_or([DEFAULT_IMAGE_TOKENS; 3]);
            assert_eq!(rules.map(|rule| rule.tokens(Some((width, height)))), expected, "{width} × {height}");
        }
        assert_eq!(rules.map(|rule| rule.tokens(None)), [1000; 3]);
        let small = ImageTokenRule::Squares { side: 28, min_pixels: 1, max_pixels: 28 * 28 * 256 };
        assert_eq!(small.tokens(None), 256, "an unknown image has no more tokens than the largest");
    }

    #[test]
    fn some_models_have_a_fixed_number() {
        let config = |text| rule(&[("config.json", text)]);
        assert_eq!(
            config(r#"{"model_type":"gemma3","mm_tokens_per_image":256}"#),
            ImageTokenRule::Fixed(256)
        );
        let llava = r#"{"model_type":"llava","vision_config":{"model_type":"clip_vision_model","image_size":336,"patch_size":14}}"#;
        assert_eq!(config(llava), ImageTokenRule::Fixed(576));
        let pixtral = r#"{"model_type":"llava","vision_config":{"model_type":"pixtral"}}"#;
        for unknown in [pixtral, r#"{"model_type":"qwen3"}"#, "{}", "[", ""] {
            assert_eq!(config(unknown), ImageTokenRule::Unknown, "{unknown}");
        }
        assert_eq!(rule(&[]).tokens(Some((9, 9))), DEFAULT_IMAGE_TOKENS);
    }

    proptest! {
        #[test]
        fn no_size_panics(size in any::<(u32, u32)>(), side in 1..=u32::MAX, min_pixels in any::<u32>(), max_pixels in any::<u32>()) {
            let rule = ImageTokenRule::Squares { side, min_pixels, max_pixels };
            let _ = (rule.tokens(Some(size)), rule.tokens(None));
        }
    }
}
