//! Sets images of a group's containers, in the version in which the group is stored.

use std::str::FromStr;

use serde_json::{Value, json};

use super::KubectlError;
use super::edit::{roles_mut, template_paths, text};

/// An assignment of the form `[ROLE[/CONTAINER]=]IMAGE`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageAssignment {
    /// The role; `None` selects all roles that run another tag of the same repository.
    pub role: Option<String>,
    /// The container; `None` selects the role's only container, or those that run another tag of the same repository.
    pub container: Option<String>,
    pub image: String,
}

/// The text assigns no image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("expected [ROLE[/CONTAINER]=]IMAGE")]
pub struct ImageAssignmentError;

impl FromStr for ImageAssignment {
    type Err = ImageAssignmentError;

    fn from_str(assignment: &str) -> Result<Self, ImageAssignmentError> {
        let (target, image) = match assignment.split_once('=') {
            Some((target, image)) => (Some(target), image),
            None => (None, assignment),
        };
        let (role, container) = match target.map(|target| target.split_once('/').unwrap_or((target, ""))) {
            Some((role, container)) => (Some(role.to_owned()), Some(container.to_owned())),
            None => (None, None),
        };
        let is_slashed = target.is_some_and(|target| target.contains('/'));
        let container = container.filter(|_| is_slashed);
        let is_empty = |text: &Option<String>| text.as_ref().is_some_and(String::is_empty);
        if image.is_empty() || image.contains(char::is_whitespace) || is_empty(&role) || is_empty(&container)
        {
            return Err(ImageAssignmentError);
        }
        Ok(Self { role, container, image: image.to_owned() })
    }
}

/// Sets the images of the group's containers.
///
/// # Errors
/// [`KubectlError::NoRole`], [`KubectlError::NoContainer`], [`KubectlError::WhichContainer`],
/// [`KubectlError::NoSuchRepository`].
pub fn set_images(group: &mut Value, assignments: &[ImageAssignment]) -> Result<(), KubectlError> {
    let templates = group["spec"]["roleTemplates"].clone();
    for assignment in assignments {
        let mut found = false;
        for role in roles_mut(group, assignment.role.as_slice())? {
            for container in matching_containers(role, &templates, assignment)? {
                set_image(role, &templates, &container, &assignment.image);
                found = true;
            }
        }
        if !found {
            let mut existing: Vec<String> = Vec::new();
            for role in roles_mut(group, &[])? {
                existing.extend(containers(role, &templates).into_iter().map(|(_, image)| image));
            }
            existing.sort_unstable();
            existing.dedup();
            return Err(KubectlError::NoSuchRepository { image: assignment.image.clone(), existing });
        }
    }
    Ok(())
}

/// The role's containers that the assignment selects.
fn matching_containers(
    role: &Value,
    templates: &Value,
    assignment: &ImageAssignment,
) -> Result<Vec<String>, KubectlError> {
    let all = containers(role, templates);
    let mut existing: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
    existing.dedup();
    let same_repository = || {
        let same = all.iter().filter(|(_, image)| repository(image) == repository(&assignment.image));
        let mut names: Vec<String> = same.map(|(name, _)| name.clone()).collect();
        names.dedup();
        names
    };
    match (&assignment.role, &assignment.container) {
        (Some(_), Some(name)) if existing.contains(name) => Ok(vec![name.clone()]),
        (Some(role), Some(name)) => {
            Err(KubectlError::NoContainer { role: role.clone(), container: name.clone(), existing })
        }
        (Some(_), None) if existing.len() == 1 => Ok(existing),
        (Some(role), None) => match same_repository() {
            names if names.is_empty() => Err(KubectlError::WhichContainer {
                role: role.clone(),
                image: assignment.image.clone(),
                existing,
            }),
            names => Ok(names),
        },
        (None, _) => Ok(same_repository()),
    }
}

/// Names and images of the role's containers, sorted by name. A name may appear with several images.
pub(super) fn containers(role: &Value, templates: &Value) -> Vec<(String, String)> {
    let mut all = Vec::new();
    let mut collect_containers = |template: &Value| {
        for container in template["spec"]["containers"].as_array().into_iter().flatten() {
            if let (Some(name), Some(image)) = (container["name"].as_str(), container["image"].as_str()) {
                all.push((name.to_owned(), image.to_owned()));
            }
        }
    };
    template_paths(role).iter().filter_map(|path| role.pointer(path)).for_each(&mut collect_containers);
    let patched: Vec<String> = all.iter().map(|(name, _)| name.clone()).collect();
    let mut shared = Vec::new();
    for container in shared_template(role, templates)["spec"]["containers"].as_array().into_iter().flatten() {
        if let (Some(name), Some(image)) = (container["name"].as_str(), container["image"].as_str()) {
            shared.push((name.to_owned(), image.to_owned()));
        }
    }
    shared.retain(|(name, _)| !patched.contains(name));
    all.extend(shared);
    all.sort_unstable();
    all.dedup();
    all
}

/// The role template that the role references; null if there is none.
fn shared_template<'a>(role: &Value, templates: &'a Value) -> &'a Value {
    let name = reference(role).map(|(_, name)| name);
    let all = templates.as_array().into_iter().flatten();
    let mut found = all.filter(|container| name.is_some() && container["name"].as_str() == name.as_deref());
    found.next().map_or(&Value::Null, |container| &container["template"])
}

/// Path of the role's patch of its role template, and the template's name; `None` if the role references none.
pub(super) fn reference(role: &Value) -> Option<(String, String)> {
    let reference_paths = [
        ("/standalonePattern/templateRef", "/standalonePattern/templateRef/patch"),
        ("/leaderWorkerPattern/templateRef", "/leaderWorkerPattern/templateRef/patch"),
        ("/templateRef", "/templatePatch"),
    ];
    reference_paths.into_iter().find_map(|(reference, patch)| {
        let name = role.pointer(reference)?["name"].as_str()?;
        Some((patch.to_owned(), name.to_owned()))
    })
}

fn set_image(role: &mut Value, templates: &Value, container: &str, image: &str) {
    let has = |template: &Value| {
        let all = template["spec"]["containers"].as_array().into_iter().flatten();
        all.into_iter().any(|item| item["name"] == container && item["image"].is_string())
    };
    let mut in_patch = false;
    let reference = reference(role).map(|(patch, _)| patch);
    for path in template_paths(role) {
        let Some(template) = role.pointer_mut(&path) else { continue };
        let patched_containers = template["spec"]["containers"].as_array_mut().into_iter().flatten();
        for item in patched_containers.filter(|item| item["name"] == container && item["image"].is_string()) {
            item["image"] = image.into();
            in_patch |= reference.as_ref() == Some(&path);
        }
    }
    // A shared role template is not changed: the image is set in this role's patch.
    if let Some(patch) = reference.filter(|_| !in_patch && has(shared_template(role, templates))) {
        let patch = super::edit::value_at_mut(role, &patch);
        if !patch["spec"]["containers"].is_array() {
            patch["spec"]["containers"] = json!([]);
        }
        let Value::Array(patched_containers) = &mut patch["spec"]["containers"] else { return };
        match patched_containers.iter_mut().find(|item| item["name"] == container) {
            Some(item) => item["image"] = image.into(),
            None => patched_containers.push(json!({ "name": container, "image": image })),
        }
    }
}

/// Strips tag and digest from an image.
pub(super) fn repository(image: &str) -> &str {
    let image = image.split('@').next().unwrap_or(image);
    let name = image.rfind('/').map_or(0, |slash| slash + 1);
    match image.get(name..).and_then(|last| last.find(':')) {
        Some(colon) => image.get(..name + colon).unwrap_or(image),
        None => image,
    }
}

/// Sorted images of all containers of a role.
pub(super) fn images(role: &Value, templates: &Value) -> Vec<String> {
    let mut images: Vec<String> = containers(role, templates).into_iter().map(|(_, image)| image).collect();
    images.sort_unstable();
    images.dedup();
    images
}

pub(super) fn name_of(role: &Value) -> String {
    text(&role["name"])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn role_and_container_of_an_image_are_optional() {
        let parse = |text: &str| {
            let assignment: ImageAssignment = text.parse().unwrap();
            (assignment.role.unwrap_or_default(), assignment.container.unwrap_or_default(), assignment.image)
        };
        let expected =
            |role: &str, container: &str, image: &str| (role.into(), container.into(), image.into());
        assert_eq!(parse("a/b:1"), expected("", "", "a/b:1"));
        assert_eq!(parse("r=a/b:1"), expected("r", "", "a/b:1"));
        assert_eq!(parse("r/c=host:5000/a@sha256:0"), expected("r", "c", "host:5000/a@sha256:0"));
        for wrong in ["", "=a", "r=", "r/=a", "/c=a", "r=a b"] {
            assert!(wrong.parse::<ImageAssignment>().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_repository_is_an_image_without_tag_and_digest() {
        let cases =
            [("a/b:1", "a/b"), ("host:5000/b", "host:5000/b"), ("b", "b"), ("h:1/b:2@sha256:0", "h:1/b")];
        for (image, expected) in cases {
            assert_eq!(repository(image), expected);
        }
    }
}
